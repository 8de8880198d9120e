// The job in numbers, its ranks, and the rank that was chosen.

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
