// Both engines' pages: tables sort and filter, marks of figures show their values; pages of runs compare and calculate.
const make = (tag, facts, ...children) => {
  const node = Object.assign(document.createElement(tag), facts);
  node.append(...children);
  return node;
};
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const cells = (tag, ...texts) => texts.map((text) => make(tag, {}, text ?? "–"));
const select = (name, label, values) => make("label", {}, label,
  make("select", { name }, ...values.map((value) => new Option(value.toLocaleString("en") || "any", value))));
const plain = (text) => text.replace("−", "-").replace(/^[≥≤=<~±+]\s*|,(?=\d{3})/g, "");
const number = (text) => /^-?[\d.]/.test(plain(text)) ? parseFloat(plain(text)) : Infinity;
const order = (a, b) => number(a) - number(b) || a.localeCompare(b);  // words after numbers
const facts = JSON.parse(document.getElementById("facts")?.textContent ?? "{}"), tool = document.getElementById("tool");

for (const table of all("main table:has(thead)")) {
  const rows = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
  const text = (row, head) => row.cells[head.cellIndex].textContent.trim();
  const kinds = (head) => [...new Set(rows.map((row) => text(row, head)))].sort(order);
  const chosen = heads.filter((head) => facts.runs && kinds(head).length > 1 && kinds(head).length <= 20);
  const fields = new Map(chosen.map((head) => [head, select("", head.textContent, ["", ...kinds(head)])]));
  const search = make("input", { type: "search", placeholder: "Filter the rows", ariaLabel: "Filter the rows" });
  const oninput = () => {
    const words = search.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = words.some((word) => !row.textContent.toLowerCase().includes(word))
      || [...fields].some(([head, { lastChild: field }]) => field.value && field.value !== text(row, head));
  };
  if (rows.length > 12) table.before(make("form", { oninput, onsubmit: () => false }, search, ...fields.values()));
  const onclick = ({ currentTarget: { parentElement: head } }) => {
    const sign = head.ariaSort === "ascending" ? -1 : 1;
    for (const other of heads) other.ariaSort = other !== head ? null : sign > 0 ? "ascending" : "descending";
    const known = (row) => text(row, head) ? 0 : 1;  // what is empty comes last
    table.tBodies[0].append(...rows.sort((a, b) => known(a) - known(b) || sign * order(text(a, head), text(b, head))));
  };
  for (const head of heads) head.append(make("button", { title: "Sort by this column", onclick }, ...head.childNodes));
}
for (const link of all(".pagination-link")) link.ariaLabel = null;  // Quarto's leaves out the number that is seen

// A mark shows its values to a pointer or a finger, and to a slider below the figure, which arrow keys move.
for (const figure of all(".marked:has(.tip)")) {
  const marks = all(".tip", figure), series = (mark) => mark?.dataset.tip.split("\n")[0];
  const slider = make("input", { type: "range", max: marks.length - 1, value: 0, ariaLabel: "Values in the figure" });
  const show = (shown) => {
    if (shown) Object.assign(slider, { value: marks.indexOf(shown), ariaValueText: shown.dataset.tip });
    const kind = (mark) => mark === shown ? "shown" : series(mark) === series(shown) ? "same" : "";
    for (const mark of marks) mark.className = `tip ${kind(mark)}`;
  };
  figure.onpointerover = ({ target, pointerType }) => pointerType === "mouse" && show(target.closest(".tip"));
  figure.onclick = (event) => {  // the first tap shows, the second opens the run
    const mark = event.target.closest(".tip");
    if (mark?.matches(":not(.shown)")) event.preventDefault();
    if (event.target !== slider) show(mark);
  };
  slider.oninput = slider.onfocus = () => show(marks[slider.value]);
  slider.onblur = figure.onpointerleave = ({ pointerType }) => pointerType !== "touch" && show();
  slider.onkeydown = ({ key }) => key !== "Enter" || marks[slider.value].click();  // false would hold the key back
  figure.append(make("label", { title: "Drag, or press the arrow keys" }, "show values", slider));
}

// All runs: of the two that are ticked what differs, and by how much.
const change = (...texts) => {  // of two numbers
  const [a, b] = texts.map((text) => /^-?\d[\d.,]*(e[-+]\d+)?$/.test(text) ? number(text) : NaN), ratio = b / a;
  return ratio > 0 && ratio < Infinity ? `${ratio.toPrecision(Math.abs(ratio - 1) > 0.02 ? 3 : 5)}x` : "";
};
const compare = (box) => {
  const ticked = all("[data-run]:checked");
  if (ticked.length > 2) return ticked.find((other) => other !== box).click();  // it makes room for the new one
  const [one, two] = ticked.map(({ dataset }) => facts.runs[dataset.run]);
  const rows = !two ? [] : Object.keys({ ...one, ...two }).flatMap((head) => {
    const [a, b] = [one[head] ?? {}, two[head] ?? {}];
    const keys = Object.keys({ ...a, ...b }).filter((key) => a[key] !== b[key]);
    const told = keys.map((key) => cells("td", key, a[key], b[key], change(a[key], b[key])));
    return keys.length ? [[make("th", { colSpan: 4 }, head)], ...told] : [];
  });
  const clear = (box) => make("button", { ariaLabel: `clear ${box.dataset.name}`, onclick: () => box.click() }, "×");
  const names = ticked.map((box) => make("th", {}, box.dataset.name, " ", clear(box)));
  const head = [...cells("th", "what differs"), ...names, ...cells("th", names[1] ? "change" : "tick another run")];
  const [first, ...rest] = [head, ...rows].map((row) => make("tr", {}, ...row));
  const table = make("table", {}, make("thead", {}, first), make("tbody", {}, ...rest));
  tool.replaceChildren(...names.length ? [table] : []);
};
for (const box of all("[data-run]")) box.onchange = () => compare(box);

// Will it fit? Of each technique its memory by cause beside the GPU's, the fastest that fits on top.
if (facts.gpus) {
  const known = facts.data.map((row) => Object.fromEntries(facts.columns.map((name, at) => [name, row[at]])));
  const values = (name) => [...new Set(known.map((row) => row[name]))].sort((a, b) => a - b);  // words as they come
  const lengths = values("tokens"), [first, last] = [lengths[0], lengths.at(-1)];
  const slide = (name, label, range) => make("label", {}, make("span", {}, label, ": ", make("b")),
    make("input", { type: "range", name, ...range }));
  const form = make("form", {}, select("model", "model", values("model")),
    select("gpu", "GPU", Object.keys(facts.gpus)), select("gpus", "GPUs at most", values("gpus")),
    slide("tokens", "tokens in a sequence", { step: 0.25, min: Math.log2(first), max: Math.log2(last), value: 13 }),
    slide("batch", "sequences on a GPU", { min: 1, max: 32, value: 1 }));
  const answer = make("p", { role: "status" }), legend = make("p"), table = make("table"), fields = form.elements;
  const gib = (size) => size.toFixed(size < 99.95 ? 1 : 0), bold = (row) => make("b", {}, row.technique);
  const count = (number) => number ? Math.round(number).toLocaleString("en") : "–";
  const between = (points, tokens) => {  // a straight line between the predictions on either side
    const at = points.findIndex((point) => point.tokens >= tokens), a = points[Math.max(0, at - 1)], b = points.at(at);
    const share = (tokens - a.tokens) / (b.tokens - a.tokens) || 0;
    return (name) => a[name] + share * (b[name] - a[name]);
  };
  const parts = (row) => Object.entries(facts.causes).filter(([cause]) => row[cause] >= 0.05);
  const explain = (row) => legend.replaceChildren(bold(row), ...parts(row).map(([cause, color]) =>
    make("span", {}, make("i", { style: `background: ${color}` }), `${cause} ${gib(row[cause])}`)));
  const draw = () => {
    const { model, gpu, gpus } = fields, { memory_gib: memory, usable, fp8 } = facts.gpus[gpu.value];
    const sizes = known.filter((row) => row.model === model.value && (fp8 || !row.technique.includes("fp8")));
    for (const option of gpus) option.disabled = !sizes.some((row) => row.gpus <= option.value);
    gpus.value = Math.max(gpus.value, Math.min(...sizes.map((row) => row.gpus)));
    const length = Math.min(last, 256 * Math.round(2 ** fields.tokens.value / 256));
    const batch = fields.batch.value = Math.min(fields.batch.value, Math.floor(last / length));
    all("b", form).forEach((shown, at) => shown.textContent = count([length, batch][at]));
    const groups = Object.groupBy(sizes.filter((row) => row.gpus <= gpus.value), (row) => row.technique);
    const rows = Object.values(groups).map((points) => {
      const needed = between(points, length * batch), row = { ...points[0], room: 0 };
      for (const name of ["needs", "least", ...Object.keys(facts.causes)]) row[name] = needed(name);
      const time = (tokens) => between(points, tokens)(gpu.value), alone = time(length);
      const busy = lengths.find((tokens) => time(2 * tokens) > 1.5 * time(tokens));  // before, the host decides
      const [a, b, c] = [1, 2, 4].map((times) => time(times * busy)), part = length / busy;
      const fixed = (8 * a - 6 * b + c) / 3, grows = (c - 3 * b + 2 * a) / 6;  // at 0 tokens; by attention
      const one = Math.min(alone - fixed, part * (b - a + (part - 3) * grows));  // sequence more
      row.speed = alone && length * batch / Math.max(alone, fixed + batch * one);
      for (let more = first; more <= last && between(points, more)("needs") <= usable; more += 1024) row.room = more;
      const rank = row.needs <= usable ? 0 : row.least <= memory - facts.outside ? 1 : 2;
      if (rank === 1) row["unused reserve"] -= row.needs - row.least;  // tight: gaps are given back in every step
      return { ...row, rank, size: rank === 1 ? row.least : row.needs };
    });
    const keys = (row) => [row.rank, ...row.rank < 2 ? [Math.sign(row.host), row.gpus, -row.speed] : [row.needs]];
    const [best] = rows.sort((a, b) => keys(a).map((key, at) => key - keys(b)[at]).find(Boolean) ?? 0);
    const fit = best.gpus > 1 ? `On several ${gpu.value} the first` : `On one ${gpu.value} the fastest`;
    const [tight, none] = ["Nothing fits with room to spare; tight is ", "Nothing fits; nearest is "];
    const told = [`: ${gib(best.size)} of ${gib(memory)} GiB`, best.gpus > 1 && ` on each of ${best.gpus}`,
      best.room && `, which fits up to ${count(best.room)} tokens${best.room === last ? " and more" : ""}`, "."];
    answer.replaceChildren([`${fit} that fits is `, tight, none][best.rank], bold(best), ...told.filter(Boolean));
    const line = (row) => {
      const ariaLabel = parts(row).map(([cause]) => `${cause} ${gib(row[cause])} GiB`).join(", ");
      let end = 0;  // the cell is as wide as one and a half GPUs
      const bands = parts(row).map(([cause, color]) => `${color} 0 ${end += row[cause] / memory / 0.015}%`);
      const style = `background: linear-gradient(90deg, ${bands}, #0000 0)`;
      const host = row.host ? [make("small", {}, `+ ${gib(row.host)} GiB of host memory`)] : [];
      const verdict = ["fits", "tight", "too large"][row.rank];
      return make("tr", { tabIndex: 0, onpointerenter: () => explain(row), onfocus: () => explain(row) },
        make("th", { scope: "row" }, row.technique, ...host),
        make("td", {}, make("div", { role: "img", ariaLabel, style })), make("td", { className: verdict }, verdict),
        ...cells("td", gib(row.size), count(row.room), count(row.speed)));
    };
    const heads = ["technique", make("div", {}, `${gib(memory)} GiB`), "verdict", "GiB needed", "room for tokens"];
    table.replaceChildren(make("thead", {}, make("tr", {}, ...cells("th", ...heads, "tokens/s of a GPU (estimate)"))),
      make("tbody", {}, ...rows.map(line)));
    explain(best);
  };
  const read = () => {  // the choice stands in the address
    const asked = new URLSearchParams(`${location.hash.slice(1)}&gpu=H100`);  // the first counts
    for (const field of fields) {
      field.value = asked.get(field.name) ?? field.value;
      if (!field.value) field.selectedIndex = 0;
    }
    draw();
  };
  form.oninput = () => {
    draw();
    location.replace(`#${new URLSearchParams(new FormData(form))}`);
  };
  (window.onhashchange = read)();
  tool.className = "fits";
  tool.append(form, answer, legend, table);
  document.querySelector("details").open = false;
}
if (window.top !== window) document.documentElement.className = "framed";

// Quarto's search fetches its index, which a browser refuses for a file on disk; a script (prepare.py) is let through.
if (location.protocol === "file:") window.fetch = async () => {
  await new Promise((onload) => document.head.append(make("script", { src: "search.js", onload })));
  return new Response(JSON.stringify(window.searchIndex));
};
window.shownWarning = true;  // that it cannot search
