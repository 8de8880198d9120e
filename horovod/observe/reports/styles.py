"""How the report's page looks, in light and in dark. Used by `page`."""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --paper: #fbfbfc; --card: #ffffff; --ink: #1b1f27; --quiet: #5d6675; --line: #e1e4ea;
  --compute: #b9c6d8; --negotiation: #9467bd; --wait: #e58a1f; --reduction: #1f8a8a;
  --late: #cf3a3a; --long: #7a5c2e; --number: #12515f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171c; --card: #1c2027; --ink: #e8eaee; --quiet: #9aa4b2; --line: #313843;
    --compute: #4a5870; --negotiation: #b08be0; --wait: #f2a23d; --reduction: #35b3ae;
    --late: #f06a6a; --long: #d9b36a; --number: #7fd0dc;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 0 0 8px; }
.verdict { font-size: 17px; margin: 0 0 18px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px; margin: 0 0 16px; }
section > p { margin: 0 0 10px; }
.quiet { color: var(--quiet); font-size: 14px; }
section.quiet h2 { color: var(--ink); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 14px; }
.tiles b { display: block; font-size: 24px; line-height: 1.2; }
.tiles span, .tiles small { display: block; }
.tiles small { color: var(--quiet); overflow-wrap: anywhere; }
.advice { margin: 0; padding-left: 22px; }
.advice li { margin: 0 0 14px; }
.advice li:last-child { margin: 0; }
.advice h3 { font-size: 15px; margin: 0; }
.advice h3 em { font-style: normal; font-weight: 400; color: var(--quiet); margin-left: 10px; }
.advice p { margin: 2px 0; }
.advice .number { color: var(--number); }
.legend span { margin-right: 18px; white-space: nowrap; }
.legend i, .explained i { display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  margin-right: 6px; vertical-align: -1px; }
.explained { list-style: none; padding: 0; margin: 0 0 12px; color: var(--quiet); font-size: 14px;
  display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 2px 20px; }
.explained b { color: var(--ink); font-weight: 600; }
i.compute { background: var(--compute); } rect.compute { fill: var(--compute); }
i.negotiation { background: var(--negotiation); } rect.negotiation { fill: var(--negotiation); }
i.wait { background: var(--wait); } rect.wait { fill: var(--wait); }
i.reduction { background: var(--reduction); } rect.reduction { fill: var(--reduction); }
i.late { background: var(--late); } rect.late { fill: var(--late); }
i.long { background: var(--long); } rect.long { fill: var(--long); }
.scroll { overflow: auto; max-height: 620px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: right; white-space: nowrap; }
thead th { color: var(--quiet); font-weight: 500; font-size: 13px; position: sticky; top: 0;
  background: var(--card); }
tbody tr { border-top: 1px solid var(--line); }
th:first-child { text-align: left; padding-left: 0; font-weight: 600; }
th small { color: var(--quiet); font-weight: 400; margin-left: 8px; }
th.name { white-space: normal; overflow-wrap: anywhere; min-width: 240px; font-weight: 500; }
td.bar { width: 40%; min-width: 160px; }
.awaited td.bar { width: 18%; min-width: 90px; }
td.bar div { display: flex; height: 16px; border-radius: 4px; overflow: hidden; gap: 1px; }
td.bar i { display: block; }
details { color: var(--quiet); font-weight: 400; font-size: 13px; }
summary { cursor: pointer; }
svg { width: 100%; height: auto; display: block; }
svg line { stroke: var(--line); }
svg text { fill: var(--quiet); font-size: 12px; }
text.axis, text.end { text-anchor: end; }
.gauge { position: relative; height: 18px; border-radius: 6px; background: var(--line);
  margin: 6px 0 12px; }
.gauge i { display: block; height: 100%; border-radius: 6px; background: var(--reduction); }
.gauge b { position: absolute; top: -4px; bottom: -4px; width: 3px; margin-left: -3px;
  border-radius: 2px; background: var(--ink); }
@media (max-width: 560px) {
  .explained { grid-template-columns: 1fr; }
  main { padding: 16px 10px; }
}
""".strip()
