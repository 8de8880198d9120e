
(() => {
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

  // -- the page --------------------------------------------------------------------------------

  let scheduled = false;
  function redraw() {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => {
      scheduled = false;
      for (const part of [showHead, showBanner, showNotice, showStalls, showRanks, showChosen,
        showSteps, showMetrics, showEvents]) part();
    });
  }

  function showHead() {
    const job = state.job;
    if (!job) return;
    text(byId("title"), job.title);
    document.title = `${job.title} · Horovod`;
    const ended = job.ended;
    const [kind, word] = ended
      ? (ended.status === 0 ? ["good", "Finished"]
        : ended.status === null && !ended.cause ? ["", "Ended"] : ["bad", "Failed"])
      : state.refused ? ["bad", "Refused"]
        : state.lost ? ["warn", "No answer"]
          : state.stalls.length ? ["warn", "Waiting"] : ["good", "Running"];
    byId("status").className = `pill ${kind}`;
    text(byId("status"), word);
    const shares = [...state.ranks.values()].filter((rank) => rank.share !== undefined);
    const share = shares.reduce((sum, rank) => sum + rank.share, 0) / (shares.length || 1);
    const until = ended ? ended.time : now();
    const numbers = [
      ["ranks", job.alive === job.size || ended ? `${job.size}` : `${job.alive}`,
        job.alive === job.size || ended ? "" : ` of ${job.size}`],
      ["hosts", `${job.hosts}`, ""],
      ["step", job.step.toLocaleString("en"), ""],
      ["steps / s", rate(job.rate), ""],
      ["waiting", shares.length ? percent(share) : "–", ""],
      ...(job.elastic ? [["generation", `${job.generation}`, ""]] : []),
      ["running for", duration(until - job.started), ""],
    ];
    byId("numbers").replaceChildren(...numbers.map(([name, value, more]) =>
      make("div", {}, make("dt", { text: name }),
        make("dd", {}, value, make("small", { text: more })))));
    text(byId("footer"), saved
      ? `Saved ${new Date(saved.board.now * 1000).toLocaleString()}.`
      : `Ranks report every ${job.interval} s.`);
  }

  let bannerShown = "";
  function showBanner() {
    const banner = byId("banner");
    const ended = state.job?.ended;
    const key = ended ? `ended ${ended.time}` : state.refused ? "refused" : state.lost ? "lost" : "";
    if (key === bannerShown) return; // an alert is read out every time that it changes
    bannerShown = key;
    banner.hidden = key === "";
    banner.className = "";
    banner.replaceChildren();
    if (ended) {
      const fine = ended.status === 0;
      banner.className = fine ? "good" : ended.status === null && !ended.cause ? "" : "bad";
      const how = ended.status === null ? "The job has ended."
        : fine ? "The job has finished: exit code 0." : `The job has failed: exit code ${ended.status}.`;
      banner.append(make("strong", { text: how }));
      if (ended.cause) banner.append(make("p", { text: ended.cause, id: "cause" }));
      if (ended.account.length) {
        banner.append(make("details", fine ? {} : { open: "" },
          make("summary", { text: "What the launcher wrote" }),
          make("pre", { text: ended.account.join("\n"), tabindex: "0" })));
      }
    } else if (state.refused) {
      banner.append("This link is not valid: open the one that the launcher has printed.");
    } else if (state.lost) {
      banner.append("The launcher does not answer: it was killed, or it cannot be reached from "
        + "here. This is what was known last; the page goes on asking.");
    }
  }

  function showNotice() {
    const job = state.job;
    byId("notice").hidden = !job?.crowded;
    text(byId("notice-what"), job?.crowded
      ? `${job.crowded}: they take turns, so that the times of single ranks say little.` : "");
    text(byId("notice-try"), job?.crowded_try ?? "");
  }

  function showStalls() {
    byId("stalls").hidden = state.stalls.length === 0;
    byId("stalls").querySelector("ul").replaceChildren(...state.stalls.map((stall) => {
      const item = make("li", {});
      const whom = stall.missing.length ? named(stall.missing) : "other ranks";
      const verb = stall.ranks.length === 1 ? "waits" : "wait";
      item.append(`${named(stall.ranks)} ${verb} for ${whom} since ${clock(stall.since)} `
        + `(${seconds(Math.max(1, Math.round(now() - stall.since)))})`);
      if (stall.tensors.length) item.append(" with ", make("code", { text: stall.tensors.join(", ") }));
      if (stall.sources.length) item.append(" at ", make("code", { text: stall.sources.join(", ") }));
      return item;
    }));
  }

  // -- ranks -----------------------------------------------------------------------------------

  const cells = new Map(); // rank -> what is in the page for it
  let layout = "";

  function showRanks() {
    const all = [...state.ranks.values()].sort((one, other) => one.rank - other.rank);
    const only = byId("filter").value === "slow";
    const shown = only ? all.filter((rank) => TROUBLE.includes(rank.state)) : all;
    const dense = all.length > MANY;
    const key = JSON.stringify([dense, only, shown.map((rank) => [rank.rank, rank.host])]);
    if (key !== layout) {
      layout = key;
      const focused = document.activeElement?.getAttribute("data-rank");
      cells.clear();
      const hosts = new Map();
      for (const rank of shown) {
        if (!hosts.has(rank.host)) hosts.set(rank.host, []);
        hosts.get(rank.host).push(rank);
      }
      const groups = [...hosts].map(([host, ranks]) => make("div", { class: "host" },
        make("h3", {}, make("b", { text: host || "somewhere" }),
          make("span", { text: `${ranks.length} rank${ranks.length === 1 ? "" : "s"}` })),
        make("div", { class: "cells" }, ...ranks.map((rank) => makeCell(rank.rank, dense)))));
      const none = only && all.length ? "No rank needs attention." : "No rank has started yet.";
      byId("ranks").className = dense ? "dense" : "";
      byId("ranks").replaceChildren(make("ul", { id: "attention", hidden: "" }),
        ...(groups.length ? groups : [make("p", { class: "empty", text: none })]));
      if (focused !== null && focused !== undefined) cells.get(Number(focused))?.button.focus();
    }
    shown.forEach((rank) => fillCell(cells.get(rank.rank), rank));
    showAttention(dense ? all.filter((rank) => TROUBLE.includes(rank.state)) : []);
  }

  function makeCell(number, dense) {
    const parts = {
      state: make("span", { class: "state" }),
      step: make("b"), rate: make("b"), share: make("b"),
      processor: make("b"), memory: make("b"), gpu: make("span"),
      bar: make("span", { class: "bar", "aria-hidden": "true" },
        ...PARTS.map((part) => make("span", { class: part }))),
      reason: make("span", { class: "reason" }),
    };
    parts.button = make("button", {
      type: "button", class: "cell", "data-rank": number,
      onclick: () => choose(state.ranks.get(number)?.worker ?? null),
    },
    make("span", { class: "top" }, make("span", { class: "number", text: dense ? number : `rank ${number}` }),
      parts.state),
    make("span", { class: "figures" },
      make("span", {}, "step ", parts.step), make("span", {}, parts.rate, " /s"),
      make("span", {}, "wait ", parts.share)),
    make("span", { class: "figures use" },
      make("span", {}, "cpu ", parts.processor), parts.gpu, make("span", {}, parts.memory)),
    parts.bar, parts.reason);
    cells.set(number, parts);
    return parts.button;
  }

  function fillCell(parts, rank) {
    const word = STATES[rank.state] ?? "unknown";
    const why = rank.why || (rank.state === "failed" ? ending(rank.code) : "");
    parts.button.className = `cell ${word}`;
    parts.button.setAttribute("aria-pressed", String(state.chosen === rank.worker));
    parts.button.setAttribute("aria-label", `rank ${rank.rank} on ${rank.host}, ${word}, step `
      + `${rank.step}, ${rate(rank.rate)} steps per second, waits ${percent(rank.share)} of the time`
      + (why ? `: ${why}` : ""));
    parts.button.title = rank.try ? `${why}. ${rank.try}` : why;
    text(parts.state, word);
    text(parts.step, rank.step.toLocaleString("en"));
    text(parts.rate, rate(rank.rate));
    text(parts.share, rank.share === undefined ? "–" : percent(rank.share));
    text(parts.processor, percent(rank.processor));
    text(parts.memory, bytes(rank.memory));
    text(parts.gpu, rank.gpu_use !== undefined ? `gpu ${percent(rank.gpu_use)}`
      : rank.gpu_memory ? `gpu ${bytes(rank.gpu_memory)}` : "");
    text(parts.reason, why);
    parts.reason.hidden = why === "";
    const split = rank.split ?? [0, 0, 0];
    const total = split[0] + split[1] + split[2] || 1;
    PARTS.forEach((_, index) => {
      parts.bar.children[index].style.width = `${100 * split[index] / total}%`;
    });
  }

  const ending = (code) => (code < 0 ? `killed by signal ${-code}` : `exit code ${code}`);

  function showAttention(ranks) {
    const list = byId("attention");
    if (!list) return;
    list.hidden = ranks.length === 0;
    list.replaceChildren(...ranks.slice(0, 6).map((rank) => make("li", {},
      make("button", { type: "button", text: `rank ${rank.rank}`, onclick: () => choose(rank.worker) }),
      `${rank.host}: ${rank.why || ending(rank.code)}`,
      rank.try ? make("span", { class: "try", text: ` ${rank.try}` }) : null)));
    if (ranks.length > 6) list.append(make("li", { text: `and ${ranks.length - 6} more` }));
  }

  // -- the chosen rank -------------------------------------------------------------------------

  function choose(worker) {
    state.chosen = worker === state.chosen ? null : worker;
    redraw();
    fetchOutput();
  }

  let outputShown = "";
  function showChosen() {
    const worker = state.chosen;
    byId("chosen").hidden = worker === null;
    if (worker === null) return;
    const rank = [...state.ranks.values()].find((each) => each.worker === worker);
    text(byId("chosen-title"), rank ? `Rank ${rank.rank} on ${rank.host}` : `Worker ${worker}`);
    byId("chosen-why").hidden = !rank?.why;
    text(byId("chosen-why"), rank?.why ?? "");
    byId("chosen-why").classList.toggle("plain", rank?.state === "ended");
    byId("chosen-try").hidden = !rank?.try;
    text(byId("chosen-try"), rank?.try ?? "");
    const split = rank?.split;
    const facts = rank ? [
      ["state", STATES[rank.state] ?? "unknown"],
      ...(rank.code === null ? [] : [["ended with", ending(rank.code)]]),
      ["process", String(rank.pid || "–")],
      ["local rank", String(rank.local_rank)],
      ...(worker.startsWith("w") ? [["worker", worker]] : []),
      ["step", rank.step.toLocaleString("en")],
      ["steps / s", rate(rank.rate)],
      ...(split ? [["compute", seconds(split[0])], ["wait", seconds(split[1])],
        ["reduction", seconds(split[2])]] : []),
      ["processor", percent(rank.processor)],
      ["memory", bytes(rank.memory)],
      ...(rank.gpu_use === undefined ? [] : [["GPU", percent(rank.gpu_use)]]),
      ...(rank.gpu_memory ? [["GPU memory", bytes(rank.gpu_memory)
        + (rank.gpu_memory_total ? ` of ${bytes(rank.gpu_memory_total)}` : "")]] : []),
      ["reduced", bytes(rank.bytes)],
      ["queue", String(rank.queue)],
      ["negotiation misses", String(rank.misses)],
    ] : [["state", "has no rank any more"]];
    byId("chosen-facts").replaceChildren(...facts.map(([name, value]) =>
      make("div", {}, make("dt", { text: name }), make("dd", { text: value }))));
    showHistory(worker);
    const lines = saved ? saved.output[numberOf(worker)] ?? [] : state.output.get(worker) ?? [];
    const key = `${worker} ${lines.length ? lines[lines.length - 1][0] : 0}`;
    if (key === outputShown) return;
    outputShown = key;
    const output = byId("output");
    const atEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 30;
    output.replaceChildren(...(lines.length ? lines.map(([, stream, line]) =>
      make("span", { class: stream === "stderr" ? "stderr" : "stdout", text: `${line}\n` }))
      : [make("span", { text: "Nothing yet." })]));
    if (atEnd) output.scrollTop = output.scrollHeight;
  }

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
})();
