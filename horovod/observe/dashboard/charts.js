const charts = (() => {
  // Draws the page's charts. `page.js` says what is in them; nothing here knows the job.

  const SVG = "http://www.w3.org/2000/svg";
  const PARTS = ["compute", "wait", "reduction"];
  const SPIKE = 20; // times as long as usual: a step that is marked even if its second looks well

  function draw(tag, properties, ...children) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(properties ?? {})) {
      if (name === "text") element.textContent = value;
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  // Between two lines of an axis; bytes are counted in powers of two.
  function niceStep(most, count, binary) {
    const rough = most / count;
    const base = binary ? 2 : 10;
    const power = base ** Math.floor(Math.log(rough) / Math.log(base) + 1e-9);
    return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  }

  // Where an axis ends: one long step must not make all others invisible.
  function axisTop(values) {
    const sorted = [...values].sort((one, other) => one - other);
    const most = sorted[sorted.length - 1];
    if (sorted.length < 5) return most;
    const usual = sorted[Math.floor(0.95 * (sorted.length - 1))];
    return most > 2 * usual && usual > 0 ? 1.3 * usual : most;
  }

  function frame(host, height, label) {
    const width = Math.max(200, host.clientWidth);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
    return { svg, width, height, left: 58, right: 10, top: 16, bottom: 20 };
  }

  function drawAxes({ svg, width, left, right }, least, most, y, format, binary = false) {
    const step = niceStep(most - least, 4, binary);
    for (let value = Math.ceil(least / step) * step; value <= most; value += step) {
      const tidy = Math.abs(value) < step / 1e6 ? 0 : value;
      svg.append(
        draw("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
        draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end",
          text: tidy === 0 ? "0" : format(tidy) }));
    }
  }

  function drawTimes({ svg, width, height, right, bottom }, [first, end], x, clock) {
    const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400];
    const wanted = (end - first) / Math.max(2, width / 130);
    const step = steps.find((each) => each >= wanted) ?? 86400 * Math.ceil(wanted / 86400);
    for (let time = Math.ceil(first / step) * step; time <= end; time += step) {
      if (x(time) < width - right - 16) {
        svg.append(draw("text", { x: x(time), y: height - bottom + 15, "text-anchor": "middle",
          text: clock(time) }));
      }
    }
  }

  // Rows that follow each other closely; where nothing was reported there is a gap, not a line.
  function runsOf(rows, pause) {
    const runs = [];
    for (const row of rows) {
      const run = runs[runs.length - 1];
      if (run && row[0] - run[run.length - 1][0] < pause) run.push(row);
      else runs.push([row]);
    }
    return runs;
  }

  const dragged = new WeakMap(); // chart -> where a selection began, in pixels
  const scales = new WeakMap(); // chart -> { toTime, left, right } of what is drawn in it

  // Lets people choose a part of the time axis by dragging over it; called once for a chart.
  function selectable(host, choose) {
    const where = (event) => {
      const { left, right } = scales.get(host);
      const box = host.getBoundingClientRect();
      return Math.min(box.width - right, Math.max(left, event.clientX - box.left));
    };
    const end = (event, keep) => {
      const from = dragged.get(host);
      dragged.delete(host);
      host.querySelector(".selection")?.remove();
      if (from === undefined || !keep) return;
      const to = where(event);
      const { toTime } = scales.get(host);
      if (Math.abs(to - from) > 8) choose(toTime(Math.min(from, to)), toTime(Math.max(from, to)));
    };
    host.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !scales.has(host)) return;
      dragged.set(host, where(event));
      try {
        host.setPointerCapture(event.pointerId);
      } catch {
        // The pointer has gone already.
      }
    });
    host.addEventListener("pointermove", (event) => {
      const from = dragged.get(host);
      const svg = host.querySelector("svg");
      if (from === undefined || !svg) return;
      host.querySelector(".selection")?.remove();
      const to = where(event);
      svg.append(draw("rect", { class: "selection", x: Math.min(from, to), y: 16,
        width: Math.abs(to - from), height: Math.max(0, svg.clientHeight - 36) }));
    });
    host.addEventListener("pointerup", (event) => end(event, true));
    host.addEventListener("pointercancel", (event) => end(event, false));
  }

  // What a step is made of, over time. Rows: start, step, compute, wait, reduction, longest step.
  function steps(host, { rows, range, width: bucket, pause, height, label, events, clock, format, read }) {
    if (!host.clientWidth || dragged.has(host)) return;
    const [first, end] = range;
    const shown = rows.filter((row) => row[0] + bucket >= first && row[0] <= end);
    const area = frame(host, height, label);
    const { svg, width, left, right, top, bottom } = area;
    const heights = shown.map((row) => row[2] + row[3] + row[4]);
    const most = Math.max(axisTop(heights.length ? heights : [1]), 1e-6) * 1.08;
    const x = (time) => left + (width - left - right) * Math.min(1, Math.max(0,
      (time - first) / Math.max(1e-3, end - first)));
    const y = (value) => height - bottom - (height - top - bottom) * Math.min(1, value / most);
    const toTime = (pixel) => first + (end - first) * (pixel - left) / (width - left - right);
    scales.set(host, { toTime, left, right });
    drawAxes(area, 0, most, y, format);
    drawTimes(area, range, x, clock);
    for (const run of runsOf(shown, pause)) {
      const points = run.length > 1 ? run : [run[0], [run[0][0] + bucket, ...run[0].slice(1)]];
      PARTS.forEach((part, index) => {
        const below = (row) => row.slice(2, 2 + index).reduce((sum, value) => sum + value, 0);
        const upper = points.map((row) => `${x(row[0])},${y(below(row) + row[2 + index])}`);
        const lower = [...points].reverse().map((row) => `${x(row[0])},${y(below(row))}`);
        svg.append(draw("polygon", { class: `area ${part}`, points: [...upper, ...lower].join(" ") }));
      });
    }
    // Steps that are longer than the axis: a mark at the top that says how long.
    const usual = shown.map((row) => row[1]).sort((a, b) => a - b)[Math.floor(shown.length / 2)];
    const spikes = shown.filter((row) => row[1] > most || row[5] > Math.max(most, SPIKE * usual));
    spikes.forEach((row, index) => {
      const at = x(row[0] + bucket / 2);
      svg.append(draw("path", { class: "spike", d: `M${at - 4} ${top + 7}h8l-4 -7z` },
        draw("title", { text: `${clock(row[0])}: a step of ${format(row[5])}` })));
      const next = index + 1 < spikes.length ? x(spikes[index + 1][0]) : width - right + 20;
      if (next - at > 60) {
        svg.append(draw("text", { class: "spike", x: at + 7, y: top + 7, text: format(row[5]) }));
      }
    });
    for (const event of events) {
      if (event.time < first || event.time > end) continue;
      const at = x(event.time);
      svg.append(draw("g", { "data-kind": event.kind },
        draw("title", { text: `${clock(event.time)} ${event.text}` }),
        draw("line", { class: `mark ${event.kind}`, x1: at, x2: at, y1: top, y2: height - bottom }),
        draw("circle", { class: `flag ${event.kind}`, cx: at, cy: top - 7, r: 4 })));
    }
    const cursor = draw("line", { class: "cursor", y1: top, y2: height - bottom, x1: -9, x2: -9 });
    svg.append(cursor);
    svg.addEventListener("pointermove", (event) => {
      if (!shown.length) return;
      const box = svg.getBoundingClientRect();
      const time = toTime((event.clientX - box.left) * width / box.width);
      const row = shown.reduce((best, each) =>
        (Math.abs(each[0] - time) < Math.abs(best[0] - time) ? each : best));
      cursor.setAttribute("x1", x(row[0]));
      cursor.setAttribute("x2", x(row[0]));
      read(row);
    });
    svg.addEventListener("pointerleave", () => read(null));
    if (!host.matches(":hover")) read(null);
    host.replaceChildren(svg);
  }

  // A curve over time or steps. Points: where, value.
  function curve(host, { points, range, height, label, format, least: floor, pause, times, ends, binary }) {
    if (!host.clientWidth) return;
    const [first, end] = range;
    const shown = points.filter((point) => point[0] >= first && point[0] <= end);
    const values = shown.length ? shown.map((point) => point[1]) : [0];
    let [least, most] = [Math.min(...values, ...(floor === undefined ? [] : [floor])), Math.max(...values)];
    const margin = (most - least || Math.abs(most) || 1) * 0.08;
    [least, most] = [least >= 0 && least - margin < 0 ? 0 : least - margin, most + margin];
    const area = frame(host, height, label);
    const { svg, width, left, right, top, bottom } = area;
    const x = (at) => left + (width - left - right) * (at - first) / Math.max(1e-3, end - first);
    const y = (value) => height - bottom - (height - top - bottom) * (value - least) / (most - least);
    drawAxes(area, least, most, y, format, binary);
    if (times) drawTimes(area, range, x, times);
    if (ends) {
      svg.append(draw("text", { x: left, y: height - 5, text: ends[0] }),
        draw("text", { x: width - right, y: height - 5, "text-anchor": "end", text: ends[1] }));
    }
    for (const run of runsOf(shown, pause ?? Infinity)) {
      svg.append(run.length > 1
        ? draw("polyline", { class: "curve",
          points: run.map(([at, value]) => `${x(at)},${y(value)}`).join(" ") })
        : draw("circle", { class: "dot", cx: x(run[0][0]), cy: y(run[0][1]), r: 3 }));
    }
    host.replaceChildren(svg);
  }

  return { steps, curve, selectable, PARTS };
})();

