// Charts, events, saving, and the start of everything.

// -- charts ----------------------------------------------------------------------------------

const pace = () => Math.max(state.job?.interval ?? 1, 1 / (state.job?.rate || 1));
const ordered = (rows) => [...rows.values()].sort((one, other) => one[0] - other[0]);

// From when to when the charts show: all of it, the last minutes, or what was dragged over.
function timeRange(rows) {
  const job = state.job;
  const last = rows.length ? rows[rows.length - 1][0] + state.width : job.started + 1;
  const end = job.ended ? Math.max(last, job.ended.time) : Math.max(last, now());
  if (Array.isArray(state.range)) return state.range;
  const losses = state.events.filter((event) => event.kind === "lost").map((event) => event.time);
  const first = Math.min(rows.length ? rows[0][0] : end - 1, ...losses);
  return [state.range === null ? first : Math.max(first, end - state.range), end];
}

function zoom(range) {
  state.range = range;
  const fixed = Array.isArray(range);
  byId("range-fixed").hidden = !fixed;
  if (fixed) text(byId("range-fixed"), `${clock(range[0])} to ${clock(range[1])}`);
  byId("range").value = fixed ? "fixed" : range === null ? "all" : String(range);
  redraw();
}

function drawSteps(host, rows, width, events, height, who, readout) {
  const last = rows[rows.length - 1];
  const label = `${who}: ${seconds(last[1])} lately, of which compute ${seconds(last[2])}, `
    + `waiting ${seconds(last[3])}, reduction ${seconds(last[4])}`;
  charts.steps(host, {
    rows, width, events, height, label, clock, format: seconds,
    range: timeRange(ordered(state.steps)),
    pause: 3.5 * Math.max(width, pace()),
    read: (row) => readSteps(readout, row ?? last,
      row ? clock(row[0]) : state.job?.ended ? "last" : "now"),
  });
}

function readSteps(readout, row, when) {
  text(readout, `${when}: ${seconds(row[1])} = compute ${seconds(row[2])}`
    + ` + wait ${seconds(row[3])} + reduction ${seconds(row[4])}`);
}

function showSteps() {
  const rows = ordered(state.steps);
  if (!rows.length) return;
  const events = state.events.filter((event) => MARKS.includes(event.kind));
  drawSteps(byId("steps-chart"), rows, state.width, events, 250, "Step time", byId("steps-readout"));
}

function showHistory(worker) {
  const known = state.history.get(worker);
  const rows = known ? ordered(known.steps) : [];
  byId("history").hidden = !rows.length;
  if (rows.length) {
    drawSteps(byId("history-steps"), rows, known.stepsWidth, [], 150, "Steps of this rank",
      byId("history-readout"));
  }
  const use = known ? ordered(known.use) : [];
  const range = timeRange(ordered(state.steps));
  const most = (index) => Math.max(0, ...use.map((row) => row[index]));
  const shown = [["Processor", 1, percent], ["Memory", 2, bytes],
    ...(most(3) ? [["GPU", 3, percent]] : []), ...(most(4) ? [["GPU memory", 4, bytes]] : [])];
  const host = byId("history-use");
  if (!use.length) return;
  if (host.children.length !== shown.length) {
    host.replaceChildren(...shown.map(() => make("figure", {},
      make("h3", {}, make("span"), make("b")), make("div", { class: "chart" }))));
  }
  shown.forEach(([name, index, format], place) => {
    const [title, chart] = host.children[place].children;
    text(title.children[0], name);
    text(title.children[1], format(use[use.length - 1][index]));
    charts.curve(chart, { points: use.map((row) => [row[0], row[index]]), range, height: 110,
      label: `${name}: ${format(use[use.length - 1][index])}`, format, least: 0,
      binary: format === bytes,
      pause: 3.5 * Math.max(known.useWidth, state.job.interval), times: clock });
  });
  const stack = known.stack;
  byId("stack").hidden = !stack;
  if (stack) {
    text(byId("stack-when"), `Where it was at ${clock(stack.time)}, when others waited for it`);
    text(byId("stack-lines"), stack.lines.join("\n"));
  }
}

function showMetrics() {
  const panel = byId("metrics-panel");
  panel.hidden = state.metrics.size === 0;
  if (panel.hidden) return;
  const drawn = [...state.metrics].sort().map(([name, { points, rank }]) => {
    const last = points[points.length - 1];
    const chart = make("div", { class: "chart" });
    const figure = make("figure", {}, make("h3", {}, make("span", { text: `${name} (rank ${rank})` }),
      make("b", { text: short(last[1]) })), chart);
    return [figure, chart, name, points, last];
  });
  byId("metrics").replaceChildren(...drawn.map(([figure]) => figure));
  for (const [, chart, name, points, last] of drawn) {
    charts.curve(chart, { points, range: [points[0][0], last[0]], height: 150, format: short,
      label: `${name}: ${short(last[1])} at step ${last[0]}`,
      ends: [`step ${points[0][0]}`, `${last[0]}`] });
  }
}

// -- events ----------------------------------------------------------------------------------

let eventsShown = 0;
function showEvents() {
  if (eventsShown === state.event || !state.events.length) return;
  eventsShown = state.event;
  const words = { well: "ok", formed: "formed", lost: "lost", joined: "joined", slow: "slow",
    decision: "change", host: "host" };
  byId("events").replaceChildren(...[...state.events].reverse().map((event) => make("li", {},
    make("time", { text: clock(event.time) }),
    make("span", { class: `kind ${words[event.kind] ? event.kind : ""}`, text: words[event.kind] ?? "" }),
    make("span", { class: "what", text: event.text }),
    event.worker ? make("button", { type: "button", text: "output",
      "aria-label": `Output of ${event.worker}`, onclick: () => choose(event.worker) }) : null)));
}

// -- saving ----------------------------------------------------------------------------------

async function save() {
  const ranks = [...state.ranks.values()];
  for (const rank of saved || state.lost ? [] : ranks) {
    if (!state.output.has(rank.worker)) {
      try {
        await fetchHistory(rank.worker);
        const answer = await fetch(`output?worker=${numberOf(rank.worker)}&since=0`);
        if (answer.ok) state.output.set(rank.worker, (await answer.json()).lines);
      } catch {
        break;
      }
    }
  }
  const output = {};
  for (const [worker, lines] of state.output) output[numberOf(worker)] = lines;
  const histories = {};
  for (const [worker, known] of state.history) {
    const packed = { version: known.version, stack: known.stack };
    for (const name of ["steps", "use"]) {
      packed[name] = { width: known[`${name}Width`], reset: true, rows: [...known[name].values()] };
    }
    histories[worker] = packed;
  }
  const board = {
    version: state.version, full: true, now: now(), job: state.job, everybody: true, ranks,
    stalls: state.stalls, events: state.events,
    steps: { width: state.width, reset: true, rows: [...state.steps.values()] },
    metrics: Object.fromEntries([...state.metrics].map(([name, series]) =>
      [name, { reset: true, ...series }])),
  };
  const packed = JSON.stringify(saved ?? { board, output, ranks: histories }).replace(/[<>&\u2028\u2029]/g,
    (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`);
  const filled = source.replace(/(<script type="application\/json" id="saved">)[^<]*/,
    (_, before) => before + packed);
  const link = make("a", { download: `horovod-${(state.job?.title ?? "job").replace(/[^\w.-]+/g, "-")}.html`,
    href: URL.createObjectURL(new Blob([`<!doctype html>\n${filled}`], { type: "text/html" })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// -- start -----------------------------------------------------------------------------------

byId("save").addEventListener("click", save);
byId("unchoose").addEventListener("click", () => choose(state.chosen));
byId("filter").addEventListener("change", redraw);
byId("range").addEventListener("change", (event) => {
  zoom(event.target.value === "all" ? null : Number(event.target.value));
});
for (const id of ["steps-chart", "history-steps"]) {
  charts.selectable(byId(id), (from, to) => zoom([from, to]));
  byId(id).addEventListener("dblclick", () => zoom(null));
}
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (Array.isArray(state.range)) zoom(null);
  else if (state.chosen !== null) choose(state.chosen);
});
window.addEventListener("resize", redraw);
if (saved) {
  byId("save").hidden = true;
  take(saved.board);
  for (const [worker, known] of Object.entries(saved.ranks ?? {})) takeHistory(worker, known);
  redraw();
} else {
  // The token has done its work: a cookie replaces it, and nobody reads it over a shoulder.
  if (location.search) history.replaceState(null, "", location.pathname);
  follow();
  setInterval(fetchOutput, 1000);
  setInterval(() => { if (!state.job?.ended) redraw(); }, 1000);
}
