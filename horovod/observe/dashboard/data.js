// What the page knows, and how it asks the launcher for more.

// What a worker or a script wrote reaches the page as text only: nothing here makes markup of it.

const PARTS = charts.PARTS;
const MANY = 48; // ranks from which a rank is a small tile
const TROUBLE = ["slow", "stopped", "silent", "failed"];
const MARKS = ["lost", "joined", "formed", "slow"];
const STATES = {
  starting: "starting", training: "training", waiting: "waiting", slow: "slow",
  stopped: "stopped", silent: "silent", ended: "ended", failed: "failed",
};

const byId = (id) => document.getElementById(id);
const source = document.documentElement.outerHTML; // before anything is drawn, for "Save page"
const saved = JSON.parse(byId("saved").textContent);

const state = {
  version: 0,
  event: 0,
  job: null,
  ranks: new Map(),
  stalls: [],
  steps: new Map(), // start of the bucket -> row
  width: 1,
  metrics: new Map(),
  events: [],
  output: new Map(), // worker -> lines
  history: new Map(), // worker -> { version, steps, stepsWidth, use, useWidth, stack }
  range: null, // what part of time the charts show: null: all, a number: the last seconds, or a pair
  chosen: null, // a worker
  skew: 0, // the launcher's clock minus ours
  lost: null, // since when the launcher does not answer
  refused: false,
};

// -- small tools -----------------------------------------------------------------------------

function make(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null) continue;
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const text = (element, value) => {
  if (element.textContent !== value) element.textContent = value;
};
const now = () => (saved ? saved.board.now : Date.now() / 1000 + state.skew);

function seconds(value) {
  if (value < 0.00095) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return value < 9.95 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`;
}

function duration(value) {
  const whole = Math.max(0, Math.floor(value));
  const pad = (number) => String(number).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const rest = `${pad(Math.floor((whole % 3600) / 60))}:${pad(whole % 60)}`;
  return hours ? `${hours}:${rest}` : rest;
}

function bytes(value) {
  if (!value) return "0";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  const scaled = value / 1024 ** power;
  return `${scaled.toFixed(scaled < 10 && power ? 1 : 0)} ${units[power]}`;
}

const rate = (value) =>
  value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
const percent = (share) => `${Math.round(100 * (share ?? 0))} %`;
const clock = (time) => new Date(time * 1000).toLocaleTimeString([], { hour12: false });
const short = (value) => (value === 0 ? "0" : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3
  ? value.toExponential(2) : String(Number(value.toPrecision(4))));

function format_ranks(ranks) {
  const found = [];
  for (const rank of ranks) {
    const last = found[found.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank;
    else found.push([rank, rank]);
  }
  return found.map(([low, high]) => (low === high ? `${low}` : `${low}-${high}`)).join(", ");
}

const named = (ranks) => `rank${ranks.length === 1 ? "" : "s"} ${format_ranks(ranks)}`;

// -- data ------------------------------------------------------------------------------------

function take(news) {
  if (news.full) {
    state.steps.clear();
    state.metrics.clear();
    state.events = [];
    state.event = 0;
  }
  state.version = news.version;
  state.skew = news.now - Date.now() / 1000;
  if (news.job) state.job = news.job;
  if (news.everybody) state.ranks.clear();
  for (const rank of news.ranks ?? []) state.ranks.set(rank.rank, rank);
  if (news.stalls) state.stalls = news.stalls;
  if (news.steps) {
    if (news.steps.reset) state.steps.clear();
    state.width = news.steps.width;
    for (const row of news.steps.rows) state.steps.set(row[0], row);
  }
  for (const [name, change] of Object.entries(news.metrics ?? {})) {
    const before = change.reset ? [] : state.metrics.get(name)?.points ?? [];
    state.metrics.set(name, { rank: change.rank, points: before.concat(change.points) });
  }
  for (const event of news.events ?? []) {
    state.events.push(event);
    state.event = event.number;
  }
  state.events = state.events.slice(-400);
}

async function follow() {
  let pause = 500;
  const page = 1 + Math.floor(Math.random() * 1e12); // the launcher waits for it at the end
  for (;;) {
    try {
      const answer = await fetch(
        `changes?since=${state.version}&event=${state.event}&page=${page}`);
      if (answer.status === 403) {
        state.refused = true;
        break;
      }
      if (!answer.ok) throw new Error(String(answer.status));
      take(await answer.json());
      state.lost = null;
      pause = 500;
      redraw();
      if (state.job?.ended) break;
    } catch {
      state.lost ??= Date.now();
      redraw();
      await new Promise((done) => setTimeout(done, pause));
      pause = Math.min(2 * pause, 15000);
    }
  }
  redraw();
}

async function fetchOutput() {
  const worker = state.chosen;
  if (worker === null || saved || state.lost || state.refused) return;
  const known = state.output.get(worker) ?? [];
  const last = known.length ? known[known.length - 1][0] : 0;
  try {
    await fetchHistory(worker);
    const answer = await fetch(`output?worker=${numberOf(worker)}&since=${last}`);
    if (!answer.ok) return;
    const lines = (await answer.json()).lines;
    if (lines.length || !state.output.has(worker)) {
      state.output.set(worker, known.concat(lines).slice(-200));
      redraw();
    }
  } catch {
    // The launcher is gone: `follow` says so.
  }
}

// What `rank` answers, put together with what is known.
function takeHistory(worker, news) {
  const known = state.history.get(worker) ?? { version: 0, steps: new Map(), use: new Map(),
    stepsWidth: 1, useWidth: 1, stack: null };
  for (const name of ["steps", "use"]) {
    const change = news[name];
    if (!change) continue;
    if (change.reset) known[name].clear();
    known[`${name}Width`] = change.width;
    for (const row of change.rows) known[name].set(row[0], row);
  }
  known.version = news.version;
  known.stack = news.stack;
  state.history.set(worker, known);
}

async function fetchHistory(worker) {
  const since = state.history.get(worker)?.version ?? 0;
  const answer = await fetch(`rank?worker=${encodeURIComponent(worker)}&since=${since}`);
  if (answer.ok) takeHistory(worker, await answer.json());
}

const numberOf = (worker) => worker.replace(/^w/, "");
