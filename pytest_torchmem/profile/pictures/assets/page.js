"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLORS = [
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951",
    "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0",
  ];
  /** Each kind has its colour, wherever it is drawn. */
  const KINDS = [
    "gradient", "parameter", "activation", "workspace", "buffer", "input", "optimizer state",
    "all-gathered parameter", "communication buffer", "other",
  ];
  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const at = (id) => document.getElementById(id);
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  /** Write bytes as the rest of the package does: "1.46 GiB". */
  function size(bytes) {
    let number = Math.abs(bytes), unit = 0;
    while (number >= 1023.995 && unit < UNITS.length - 1) { number /= 1024; unit += 1; }
    const digits = unit === 0 ? 0 : number < 99.995 ? 2 : 1;
    return (bytes < 0 ? "-" : "") + number.toFixed(digits) + " " + UNITS[unit];
  }

  function element(tag, text, kind) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  }

  /** The colour of a kind, which may say how sure its bytes are ("workspace, at most"). */
  function colour(kind) {
    const place = KINDS.indexOf(kind.split(",")[0]);
    return COLORS[place < 0 ? KINDS.length - 1 : place];
  }

  function row(cells, tag = "td") {
    const made = element("tr");
    for (const [text, kind] of cells) made.append(element(tag, text, kind));
    return made;
  }

  function head() {
    document.querySelector("h1").textContent = data.title;
    for (const line of data.lines) at("lines").append(element("li", line));
    for (const note of data.notes) at("notes").append(element("li", note));
    if (!data.notes.length) at("notes").parentElement.hidden = true;
    if (data.message) { at("message").textContent = data.message; at("message").hidden = false; }
    const before = data.before;
    const cells = [["figure", ""], ["now", "number"], ["bytes", "number"]];
    if (before) cells.push(["snapshot", "number"], ["change", "number"]);
    at("figures").append(row(cells, "th"));
    for (const [name, bytes] of Object.entries(data.figures)) {
      const found = [
        [name.replaceAll("_", " "), ""], [size(bytes), "number"],
        [bytes.toLocaleString("en-US"), "number"],
      ];
      if (before) {
        const known = name in before, step = bytes - before[name];
        const kind = step > 0 ? "number grown" : step < 0 ? "number shrunk" : "number";
        found.push([known ? size(before[name]) : "-", "number"]);
        found.push([known ? (step > 0 ? "+" : "") + size(step) : "-", kind]);
      }
      at("figures").append(row(found));
    }
  }

  // -- the chart ------------------------------------------------------------------------------

  let chart = null, held = false;

  function cumulated(stack) {
    const sums = [];
    let below = new Array(data.positions.length).fill(0);
    for (const series of stack.series) {
      below = series.map((bytes, index) => bytes + below[index]);
      sums.push(below);
    }
    return sums;
  }

  function draw() {
    const stack = data.stacks[at("by").value];
    const sums = cumulated(stack);
    const ofKind = at("by").value === "kind";
    const colours = stack.names.map((name, index) => ofKind ? colour(name) : COLORS[index % COLORS.length]);
    const series = [{}], columns = [data.positions], bands = [];
    // The highest line is drawn first, so that every area reaches down to the next one.
    for (let index = sums.length - 1; index >= 0; index -= 1) {
      const color = colours[index];
      series.push({ label: stack.names[index], stroke: color, fill: color + "cc", width: 0,
                    points: { show: false } });
      if (index > 0) bands.push({ series: [series.length - 1, series.length] });
      columns.push(sums[index]);
    }
    if (data.earlier) {
      series.push({ label: "before", stroke: style("--text"), width: 1.5, dash: [4, 4],
                    points: { show: false } });
      columns.push(data.earlier);
    }
    const axis = { stroke: style("--muted"), grid: { stroke: style("--line"), width: 1 },
                   ticks: { stroke: style("--line"), width: 1 } };
    const options = {
      width: at("chart").clientWidth, height: 340, legend: { show: false }, series, bands,
      scales: { x: { time: false }, y: { range: (_, __, most) => [0, most * 1.08 || 1] } },
      axes: [
        { ...axis, label: "allocations and frees, in order", labelSize: 20,
          values: (_, ticks) => ticks.map((tick) => tick.toLocaleString("en-US")) },
        { ...axis, size: 84, splits: splits, values: (_, ticks) => ticks.map(size) },
      ],
      cursor: { points: { show: false } },
      hooks: { drawClear: [shade], draw: [mark], setCursor: [follow] },
    };
    if (chart) chart.destroy();
    at("chart").replaceChildren();
    chart = new uPlot(options, columns, at("chart"));
    chart.over.addEventListener("click", () => { held = !held; });
    at("legend").replaceChildren(...stack.names.map((name, index) => {
      const item = element("li"), square = element("i");
      square.style.background = colours[index];
      item.append(square, name);
      return item;
    }));
    if (data.earlier) {
      const item = element("li"), line = element("i");
      line.className = "dashed";
      item.append(line, "in what it is compared with");
      at("legend").append(item);
    }
  }

  /** Return ticks at powers of two times 1, 2 or 4, so that sizes are round. */
  function splits(_, __, least, most) {
    const step = 2 ** Math.max(0, Math.ceil(Math.log2(Math.max(1, most - least) / 6)));
    const found = [];
    for (let tick = Math.ceil(least / step) * step; tick <= most; tick += step) found.push(tick);
    return found;
  }

  /** Shade every second phase, and name those that are wide enough. */
  function shade(plot) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio;
    const soft = style("--soft"), muted = style("--muted"), widths = {};
    ctx.save();
    ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    data.phases.forEach(([start, stop, phase], index) => {
      const left = plot.valToPos(start, "x", true), right = plot.valToPos(stop, "x", true);
      if (index % 2) {
        ctx.fillStyle = soft;
        ctx.fillRect(left, bbox.top, right - left, bbox.height);
      }
      widths[phase] ??= ctx.measureText(phase).width;
      if (right - left > widths[phase] + 8 * ratio) {
        ctx.fillStyle = muted;
        ctx.fillText(phase, Math.max(left, bbox.left) + 4 * ratio, bbox.top + 13 * ratio);
      }
    });
    ctx.restore();
  }

  function mark(plot) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio;
    const x = plot.valToPos(data.peak.position, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    const text = `peak ${size(data.peak.nbytes)}`;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = style("--text");
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    // A peak of one event is narrower than a pixel.
    ctx.beginPath(); ctx.arc(x, plot.valToPos(data.peak.nbytes, "y", true), 4 * ratio, 0, 2 * Math.PI); ctx.fill();
    ctx.font = `600 ${12 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";  // the chart has centred its labels
    const width = ctx.measureText(text).width, room = bbox.left + bbox.width - x;
    const left = room > width + 12 * ratio ? x + 4 * ratio : x - width - 4 * ratio;
    const top = bbox.top + 18 * ratio;  // below the names of the phases
    ctx.fillStyle = style("--back");
    ctx.globalAlpha = 0.8;
    ctx.fillRect(left - 2 * ratio, top, width + 4 * ratio, 15 * ratio);
    ctx.globalAlpha = 1;
    ctx.fillStyle = style("--text");
    ctx.fillText(text, left, top + 11 * ratio);
    ctx.restore();
  }

  // -- what is alive under the pointer --------------------------------------------------------

  const counts = new Array(data.groups.length).fill(0);
  const bytes = new Array(data.groups.length).fill(0);
  let current = -1, shown = -1, asked = 0;

  function move(sample) {
    while (current < sample) { current += 1; apply(data.changes[current], 1); }
    while (current > sample) { apply(data.changes[current], -1); current -= 1; }
  }

  function apply(changes, sign) {
    for (let index = 0; index < changes.length; index += 3) {
      counts[changes[index]] += sign * changes[index + 1];
      bytes[changes[index]] += sign * changes[index + 2];
    }
  }

  function follow(plot) {
    if (held || plot.cursor.idx === null || plot.cursor.idx === undefined) return;
    const sample = plot.cursor.idx;
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(() => list(sample));
  }

  /** Whether what is searched for is in one of the texts. */
  function matches(id, texts) {
    const wanted = at(id).value.trim().toLowerCase();
    return !wanted || texts.some((text) => String(text).toLowerCase().includes(wanted));
  }

  function list(sample, again = false) {
    if (sample === shown && !again) return;
    shown = sample;
    move(sample);
    const position = data.positions[sample];
    const span = data.phases.find(([start, stop]) => position > start && position <= stop);
    const of = data.events.toLocaleString("en-US");
    at("here").textContent = `${size(data.totals[sample])} alive after event ` +
      `${position.toLocaleString("en-US")} of ${of}` + (span ? `, in ${span[2]}` : "") +
      (data.earlier ? `; before ${size(data.earlier[sample])}` : "");
    at("chart").setAttribute("aria-valuemax", data.events);
    at("chart").setAttribute("aria-valuenow", position);
    at("chart").setAttribute("aria-valuetext", at("here").textContent);
    const largest = [...bytes.keys()]
      .filter((group) => counts[group] > 0 && matches("find-alive", data.groups[group]))
      .sort((one, other) => bytes[other] - bytes[one]);
    const rows = largest.slice(0, 60).map((group) => {
      const [kind, module, operator, name, line] = data.groups[group];
      const made = row([
        [size(bytes[group]), "number"], [`${counts[group]} ×`, "number"], [kind, "kind"],
        [name, "name"], [module, "name"], [operator, "name"], [line, "name"],
      ]);
      const square = element("i");
      square.style.background = colour(kind);
      made.children[2].prepend(square);
      return made;
    });
    const titles = ["bytes", "number", "kind", "what", "module", "operator", "line"];
    const more = largest.length - 60;
    if (more > 0) rows.push(row([["", ""], ["", ""], [`and ${more} smaller groups`, "muted"]]));
    at("alive").replaceChildren(
      row(titles.map((title, index) => [title, index < 2 ? "number" : ""]), "th"), ...rows);
  }

  function peak() {
    held = true;
    list(data.positions.indexOf(data.peak.position));
  }

  /** Move the pointer by the keyboard. */
  function step(event) {
    const far = event.shiftKey ? 20 : 1, last = data.positions.length - 1;
    const next = { ArrowLeft: shown - far, ArrowRight: shown + far, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    held = true;
    list(Math.min(last, Math.max(0, next)));
    chart.setCursor({ left: chart.valToPos(data.positions[shown], "x"), top: 1 });
  }

  // -- the flame graph ------------------------------------------------------------------------

  function flame(root) {
    const place = at("flame"), width = place.clientWidth, boxes = [];
    let deepest = 0;
    const lay = (node, left, depth, path) => {
      const span = width * node.b / Math.max(1, root.b);
      if (span < 1) return;
      deepest = Math.max(deepest, depth);
      const box = element("button", `${node.n} ${size(node.b)}`);
      box.style.left = `${left}px`; box.style.width = `${span}px`; box.style.top = `${depth * 20}px`;
      box.style.background = `color-mix(in srgb, var(--muted) ${10 + hash(node.n) % 5 * 5}%, var(--back))`;
      box.title = `${path}\n${size(node.b)} (${node.b.toLocaleString("en-US")} bytes)`;
      box.addEventListener("click", () => flame(node === root ? data.flame : node));
      boxes.push(box);
      let next = left;
      for (const child of node.c) {
        lay(child, next, depth + 1, `${path}.${child.n}`);
        next += width * child.b / Math.max(1, root.b);
      }
    };
    lay(root, 0, 0, root.n);
    place.style.height = `${(deepest + 1) * 20}px`;
    place.replaceChildren(...boxes);
  }

  function hash(text) {
    let found = 7;
    for (const letter of text) found = (found * 31 + letter.codePointAt(0)) >>> 0;
    return found;
  }

  // -- segments and the plan: when across, addresses upwards ----------------------------------

  function arena(id, pointer) {
    const drawn = data[id], canvas = at(id), ratio = devicePixelRatio;
    if (!drawn) { canvas.parentElement.hidden = true; return; }
    const width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = width * ratio; canvas.height = height * ratio;
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    const across = (event) => event * width / Math.max(1, data.events);
    const upwards = (address) => height - address * (height - 18) / Math.max(1, drawn.arena);
    const back = style("--back");
    let found = null;
    ctx.fillStyle = style("--soft"); ctx.strokeStyle = style("--line"); ctx.lineWidth = 1;
    for (const [offset, bytes, start] of drawn.segments) {
      const area = [across(start), upwards(offset + bytes), width - across(start), upwards(offset) - upwards(offset + bytes)];
      ctx.fillRect(...area); ctx.strokeRect(...area);
    }
    for (const box of drawn.boxes) {
      const [offset, bytes, start, stop, name] = box;
      const left = across(start), right = across(stop), top = upwards(offset + bytes);
      const wide = Math.max(right - left, 0.5), high = Math.max(upwards(offset) - top, 0.5);
      ctx.fillStyle = colour(drawn.names[name][0]) + "cc";
      ctx.fillRect(left, top, wide, high);
      if (wide > 3 && high > 3) {
        ctx.strokeStyle = back; ctx.lineWidth = 0.5;
        ctx.strokeRect(left, top, wide, high);
      }
      if (pointer && pointer.offsetX >= left && pointer.offsetX <= left + wide &&
          pointer.offsetY >= top && pointer.offsetY <= top + high) found = box;
    }
    ctx.setLineDash([4, 3]); ctx.strokeStyle = ctx.fillStyle = style("--text"); ctx.lineWidth = 1;
    const least = upwards(drawn.live);
    ctx.beginPath(); ctx.moveTo(0, least); ctx.lineTo(width, least); ctx.stroke();
    ctx.font = "12px system-ui, sans-serif";
    ctx.fillText(`most alive at once ${size(drawn.live)}`, 4, Math.max(12, least - 4));
    const [offset, bytes, start, stop, name] = found || [];
    at(`${id}-here`).textContent = !found ? "" :
      `${size(bytes)} at ${size(offset)}, from event ${start.toLocaleString("en-US")} to ` +
      `${stop.toLocaleString("en-US")}: ${drawn.names[name].filter((part) => part).join(", ")}`;
  }

  function arenaFigures(id) {
    const drawn = data[id];
    if (!drawn) return;
    const left = drawn.storages - drawn.boxes.length, parts = [drawn.said];
    if (left > 0) parts.push(`${left.toLocaleString("en-US")} smaller storages are not drawn`);
    at(`${id}-figures`).textContent = parts.join("; ");
  }

  // -- the operators --------------------------------------------------------------------------

  let sorted = -1;

  function operators() {
    const table = data.operators;
    if (!table) { at("operators").closest("section").hidden = true; return; }
    const isText = (column) => column < 3;
    const rows = table.rows.filter((cells) => matches("find-operators", cells.slice(0, 3)));
    if (sorted >= 0) rows.sort((one, other) => isText(sorted)
      ? one[sorted].localeCompare(other[sorted]) : other[sorted] - one[sorted]);
    const left = table.all - table.rows.length;
    at("left-out").textContent = "click a column to sort" +
      (left > 0 ? `; ${left.toLocaleString("en-US")} smaller rows are left out` : "");
    const titles = row(table.columns.map((name, column) =>
      [name.replaceAll("_", " "), isText(column) ? "" : "number"]), "th");
    [...titles.children].forEach((cell, column) => {
      const sort = () => { sorted = sorted === column ? -1 : column; operators(); };
      cell.tabIndex = 0;
      cell.ariaSort = sorted !== column ? "none" : isText(column) ? "ascending" : "descending";
      cell.addEventListener("click", sort);
      cell.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        sort();
        at("operators").querySelectorAll("th")[column].focus();
      });
    });
    const text = (name, number) => !number ? "" : name === "calls" ? String(number)
      : name.endsWith("flops") ? count(number) : size(number);
    at("operators").replaceChildren(titles, ...rows.map((cells) => row(cells.map((cell, column) =>
      isText(column) ? [cell, column < 2 ? "name" : "name line"] : [text(table.columns[column], cell), "number"]))));
  }

  /** Write operations as the rest of the package does: "1.46 G". */
  function count(number) {
    let unit = 0;
    while (number >= 999.5 && unit < 5) { number /= 1000; unit += 1; }
    const digits = !unit || number >= 99.95 ? 0 : number >= 9.995 ? 1 : 2;
    return `${number.toFixed(digits)} ${" kMGTP"[unit]}`.trim();
  }

  // -- all of it ------------------------------------------------------------------------------

  head();
  for (const name of Object.keys(data.stacks)) at("by").append(element("option", name));
  if (data.stacks.kind.names.length < 2) at("by").value = "operator";  // a recording has no kinds
  at("by").addEventListener("change", draw);
  at("to-peak").addEventListener("click", peak);
  const all = () => { draw(); setTimeout(() => flame(data.flame)); arenas(); };
  const arenas = () => { for (const id of ["segments", "plan"]) setTimeout(() => arena(id)); };
  for (const id of ["segments", "plan"]) {
    at(id).addEventListener("mousemove", (pointer) => arena(id, pointer));
    arenaFigures(id);
  }
  at("chart").addEventListener("keydown", step);
  at("find-alive").addEventListener("input", () => list(shown, true));
  at("find-operators").addEventListener("input", operators);
  addEventListener("resize", all);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { draw(); arenas(); });
  // Each part is a task of its own: none keeps the browser long.
  setTimeout(() => { all(); setTimeout(() => { peak(); held = false; }); });
  setTimeout(operators);
})();
