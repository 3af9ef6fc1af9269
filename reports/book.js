// Both engines' pages: tables sort and filter, marks of figures show their values; the pages of runs compare and calculate.
const make = (tag, { style, ...facts } = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), facts);
  Object.assign(node.style, style);
  node.append(...children);
  return node;
};
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const select = (name, label, values) => make("label", {}, label,
  make("select", { name }, ...values.map((value) => new Option(value.toLocaleString("en") || "any", value))));
const number = (text) => /^[-+±~]?[\d.]/.test(text) ? parseFloat(text.replace(/,(?=\d{3})/g, "")) : Infinity;
const order = (a, b) => number(a) - number(b) || a.localeCompare(b);  // words after numbers
const facts = JSON.parse(document.getElementById("facts")?.textContent ?? "{}"), tool = document.getElementById("tool");

for (const table of all("main table:has(thead)")) {
  const rows = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
  const text = (row, head) => row.cells[head.cellIndex].textContent.trim();
  const kinds = (head) => [...new Set(rows.map((row) => text(row, head)))].sort(order);
  const chosen = facts.runs ? heads.filter((head) => kinds(head).length > 1 && kinds(head).length <= 20) : [];
  const fields = chosen.map((head) => select("", head.textContent, ["", ...kinds(head)]));
  const search = make("input", { type: "search", placeholder: "Filter the rows", ariaLabel: "Filter the rows" });
  const oninput = () => rows.forEach((row) => {
    const words = search.value.toLowerCase().split(/\s+/), isKind = ({ lastChild: { value } }, at) => !value || value === text(row, chosen[at]);
    row.hidden = !(fields.every(isKind) && words.every((word) => row.textContent.toLowerCase().includes(word)));
  });
  if (rows.length > 12) table.before(make("form", { oninput, onsubmit: () => false }, search, ...fields));
  const onclick = ({ currentTarget: { parentElement: head } }) => {
    const sign = head.ariaSort === "ascending" ? -1 : 1;
    for (const other of heads) other.ariaSort = other !== head ? null : sign > 0 ? "ascending" : "descending";
    table.tBodies[0].append(...rows.sort((a, b) => sign * order(text(a, head), text(b, head))));
  };
  for (const head of heads) head.append(make("button", { title: "Sort by this column", onclick }, ...head.childNodes));
}
for (const wide of all("main table, math[display=block], pre, figure"))
  if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;  // it scrolls
for (const image of all("figure img")) image.onclick = () => image.closest("figure").classList.toggle("large");  // on a phone

// A mark shows its values where a pointer or a finger is, and where a slider below the figure, or an arrow key on it, gets.
for (const figure of all(".marked:has(.tip)")) {
  const marks = all(".tip", figure), series = (mark) => mark?.dataset.tip.split("\n")[0];
  const slider = make("input", { type: "range", max: marks.length - 1, value: 0, ariaLabel: "Values in the figure" });
  const show = (shown) => {
    slider.value = marks.indexOf(shown);
    slider.ariaValueText = shown?.dataset.tip;
    for (const mark of marks) mark.className = `tip ${mark === shown ? "shown" : series(mark) === series(shown) ? "same" : ""}`;
  };
  for (const mark of marks) {
    mark.onpointerenter = ({ pointerType }) => pointerType === "mouse" && show(mark);
    mark.onclick = (event) => {  // the first tap shows, the second opens the run
      if (mark.className !== "tip shown") event.preventDefault();
      show(mark);
    };
  }
  slider.oninput = slider.onfocus = () => show(marks[slider.value]);
  slider.onblur = figure.onpointerleave = ({ pointerType }) => pointerType !== "touch" && show();
  slider.onkeydown = ({ key }) => key === "Enter" && marks[slider.value].click();
  figure.firstElementChild.addEventListener("click", () => show());
  figure.append(slider);
}

// All runs: of the two that were ticked last what differs, and by how much.
const change = (...texts) => {  // a ratio; of what is nearly equal, or of another sign, the difference
  const [a, b] = texts.map((text) => /^-?\d[\d.,]*(e[-+]\d+)?$/.test(text) ? number(text) : NaN), ratio = b / a;
  if (ratio > 0 && ratio < Infinity && Math.abs(ratio - 1) > 0.02) return `${ratio.toPrecision(3)}x`;
  return Number.isNaN(b - a) ? "" : `${b < a ? "−" : "+"}${+Math.abs(b - a).toPrecision(3)}`;
};
const ticked = [];
const compare = (box) => {
  const row = (...cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell ?? "–")));
  const clear = (box) => make("button", { ariaLabel: `clear ${box.dataset.name}`, onclick: () => box.click() }, "×");
  if (box.checked) ticked.push(box);
  else ticked.splice(ticked.indexOf(box), 1);
  if (ticked.length > 2) return ticked[0].click();
  const rows = ticked.length < 2 ? [] : Object.entries(facts.usual).flatMap(([head, usual]) => {
    const [one, two] = ticked.map(({ dataset }) => ({ ...usual, ...facts.runs[dataset.run][head] }));
    const keys = Object.keys({ ...one, ...two }).filter((key) => one[key] !== two[key]);
    const title = make("tr", {}, make("th", { colSpan: 4 }, head));
    return keys.length ? [title, ...keys.map((key) => row(key, one[key], two[key], change(one[key], two[key])))] : [];
  });
  const names = ticked.map((box) => make("th", {}, box.dataset.name, " ", clear(box)));
  const heads = make("tr", {}, make("th", {}, "what differs"), ...names, make("th", {}, names[1] ? "change" : "tick another"));
  tool.replaceChildren(...ticked.length ? [make("table", {}, make("thead", {}, heads), make("tbody", {}, ...rows))] : []);
};
for (const box of all("[data-run]")) box.onchange = () => compare(box);

// Will it fit? Of each technique its memory by cause beside the GPU's, the fastest that fits on top; the choice is in the address.
if (facts.gpus) {
  const known = facts.data.map((row) => Object.fromEntries(facts.columns.map((name, at) => [name, row[at]])));
  const values = (name) => [...new Set(known.map((row) => row[name]))].sort((a, b) => a - b);  // words stay in their order
  const task = { model: "model", seq_len: "tokens", batch_size: "batch per GPU" };
  const form = make("form", {}, ...Object.keys(task).map((name) => select(name, task[name], values(name))),
    select("gpu", "your GPU", Object.keys(facts.gpus)));
  const answer = make("p", { role: "status" }), legend = make("p"), table = make("table"), fields = form.elements;
  const gib = (size) => size.toFixed(size < 99.95 ? 1 : 0), bold = (row) => make("b", {}, row.technique);
  const cells = (tag, ...texts) => texts.map((text) => make(tag, {}, text));

  const draw = () => {
    let rows = known;
    for (const name of Object.keys(task)) {  // what is not in the table cannot be chosen
      const held = new Set(rows.map((row) => `${row[name]}`));
      for (const option of fields[name].options) option.disabled = !held.has(option.value);
      if (!held.has(fields[name].value)) [fields[name].value] = held;
      rows = rows.filter((row) => `${row[name]}` === fields[name].value);
    }
    const gpu = fields.gpu.value ||= Object.keys(facts.gpus)[0], memory = facts.gpus[gpu];
    const rank = (row) => ({ fits: 0, tight: 1, "too large": 2 })[row[gpu]] ?? 3;
    const keys = (row) => [rank(row), ...rank(row) < 2 ? [row.gpus, -row.tokens_per_s] : [row.reserved_gib]];
    const [best] = rows.sort((a, b) => keys(a).map((key, at) => key - keys(b)[at]).find(Boolean) ?? 0);
    const alone = rows.filter((row) => rank(row) === 0 && row.gpus === 1);
    const least = alone.reduce((a, b) => b.reserved_gib < a.reserved_gib ? b : a, best);
    const opening = [best.gpus > 1 ? `Nothing fits on one ${gpu}; what fits is ` : `On one ${gpu} the fastest that fits is `,
      "Nothing fits with room to spare; tight is ", "Nothing fits; nearest is "][Math.min(rank(best), 2)];
    answer.replaceChildren(opening, bold(best), `: ${gib(best.reserved_gib)} of ${gib(memory)} GiB`,
      best.gpus > 1 ? ` on each of ${best.gpus}.` : ".",
      ...least === best ? [] : [" The smallest is ", bold(least), `: ${gib(least.reserved_gib)} GiB.`]);

    const scale = Math.min(Math.max(1.25 * memory, ...rows.map((row) => row.reserved_gib)), 2.5 * memory);
    const causes = Object.entries(facts.causes).filter(([cause]) => rows.some((row) => row[cause] >= 0.05));
    const explain = (row) => legend.replaceChildren(bold(row), ...causes.map(([cause, background]) =>
      make("span", {}, make("i", { style: { background } }), cause, row[cause] < 0.05 ? "" : ` ${gib(row[cause])}`)));
    const line = (row) => {
      const parts = causes.filter(([cause]) => row[cause] >= 0.05), more = () => explain(row);
      const bar = make("div", { role: "img", ariaLabel: parts.map(([cause]) => `${cause} ${gib(row[cause])} GiB`).join(", ") },
        ...parts.map(([cause, background]) => make("span", { style: { background, width: `${100 * row[cause] / scale}%` } })));
      const host = row.host_gib ? [make("small", {}, `+ ${gib(row.host_gib)} GiB of host memory`)] : [];
      return make("tr", { tabIndex: 0, onpointerenter: more, onfocus: more, onclick: more },
        make("th", { scope: "row" }, row.technique, ...host), make("td", {}, bar), make("td", { className: row[gpu] }, row[gpu]),
        ...cells("td", gib(row.reserved_gib), Math.round(row.tokens_per_s).toLocaleString("en").replace(/^0$/, "–")));
    };
    const full = make("div", {}, `${gib(memory)} GiB`);
    const heads = make("tr", {}, ...cells("th", "technique", full, "verdict", "GiB reserved", "tokens/s"));
    table.replaceChildren(make("thead", {}, heads), make("tbody", {}, ...rows.map(line)));
    table.style.setProperty("--limit", `${100 * memory / scale}%`);
    explain(best);
  };
  const read = () => {
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) if (fields[name]) fields[name].value = value;
    draw();
  };
  form.oninput = () => {
    draw();
    location.replace(`#${new URLSearchParams(new FormData(form))}`);
  };
  window.onhashchange = read;
  read();
  tool.className = "fits";
  tool.append(form, answer, legend, table);
  document.querySelector("details").open = false;
}

// A page within a page is as high as what it holds.
if (window.top !== window) {
  document.documentElement.className = "framed";
  new ResizeObserver(() => parent.postMessage(document.documentElement.offsetHeight, "*")).observe(document.body);
}
window.addEventListener("message", ({ source, data }) => {
  for (const frame of all("main iframe")) if (frame.contentWindow === source) frame.style.height = `${Number(data) + 4}px`;
});

// Quarto's search fetches its index, which a browser refuses for a file on disk; a script (prepare.py) is let through.
if (location.protocol === "file:") window.fetch = async () => {
  await new Promise((onload) => document.head.append(make("script", { src: "search.js", onload })));
  return new Response(JSON.stringify(window.searchIndex));
};
window.shownWarning = true;  // that it cannot search

if (location.hostname === "127.0.0.1") setInterval(async () => {  // `lsai report --watch` makes the page anew
  const { headers } = await fetch(location.pathname, { method: "HEAD", cache: "no-store" });
  if (new Date(headers.get("Last-Modified")) > new Date(document.lastModified)) location.reload();
}, 1000);
