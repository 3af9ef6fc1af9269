// Both engines' pages: tables sort and filter, marks of figures show their values; pages of runs compare.
const make = (tag, facts, ...children) => {
  const node = Object.assign(document.createElement(tag), facts);
  node.append(...children);
  return node;
};
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const cells = (tag, ...texts) => texts.map((text) => make(tag, {}, text ?? "–"));
const plain = (text) => text.replace("−", "-").replace(/^[≥≤=<~±+]\s*|,(?=\d{3})/g, "");
const number = (text) => /^-?[\d.]/.test(plain(text)) ? parseFloat(plain(text)) : Infinity;
const order = (a, b) => number(a) - number(b) || a.localeCompare(b);  // words after numbers
const facts = JSON.parse(document.getElementById("facts")?.textContent ?? "{}"), tool = document.getElementById("tool");

// Light or dark is as the system is, until the reader chooses. Quarto has a button of its own.
if (!document.body.className) {
  const kept = (() => { try { return localStorage; } catch { return {}; } })(), { style } = document.documentElement;
  style.colorScheme = kept.colorScheme ?? "";
  const onclick = () => {
    const dark = (style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    kept.colorScheme = style.colorScheme = dark ? "light" : "dark";
  };
  const words = { title: "Light or dark", ariaLabel: "Light or dark", textContent: "◐" };
  document.querySelector("nav")?.prepend(make("button", { className: "theme", type: "button", onclick, ...words }));
}

for (const table of all("main table:has(thead)")) {
  const rows = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
  const text = (row, head) => row.cells[head.cellIndex].textContent.trim();
  const kinds = (head) => [...new Set(rows.map((row) => text(row, head)))].sort(order);
  const chosen = heads.filter((head) => facts.runs && kinds(head).length > 1 && kinds(head).length <= 20);
  const options = (head) => ["", ...kinds(head)].map((kind) => new Option(kind || "any", kind));
  const fields = new Map(chosen.map((head) => [head, make("label", {}, head.textContent, make("select", {}, ...options(head)))]));
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
  // Rows that lean on the one above them stay where they are.
  if (rows.some((row) => /^(the same|\+|…|")/.test(row.cells[0].textContent.trim()))
    || /over the (line|row)\s+above/.test(table.closest("figure")?.textContent ?? table.textContent)) continue;
  for (const head of heads) {  // a link in a header stays a link
    const words = head.querySelector("a") ? [] : [...head.childNodes];
    const facts = { title: "Sort by this column", onclick, ariaLabel: words.length ? null : `sort by ${head.textContent}` };
    head.append(make("button", facts, ...words));
  }
}
all("main th, main td[style*=left]:not(:has(input))").forEach((td) => td.style.setProperty("--letters", td.textContent.length));
addEventListener("load", () => {  // what scrolls can be reached by keys
  for (const part of all("main pre, main table, main p:has(> math), main figure > *"))
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
});
all(".sidebar-item-toggle, a[role=navigation]").forEach((toggle) => toggle.role = "button");  // Quarto's landmarks have no names
for (const [place, ariaLabel] of [["#quarto-sidebar", "Contents"], [".quarto-secondary-nav", "Place in the book"],
  ["#TOC:not([aria-label])", "On this page"]])
  all(place).forEach((nav) => Object.assign(nav, { ariaLabel }));
for (const link of all(".pagination-link")) link.ariaLabel = null;  // Quarto's leaves out the number that is seen

// A figure tells the values at the pointer, the finger, or, after Tab, where the arrow keys have come to.
const told = make("div", { id: "told", hidden: true });
document.body.append(told);
const place = (mark) => {  // over the mark, inside of the window
  const at = mark.getBoundingClientRect(), half = told.offsetWidth / 2, wide = document.documentElement.clientWidth;
  const x = Math.max(half + 4, Math.min(wide - half - 4, at.left + at.width / 2));
  const above = at.top - told.offsetHeight - 8, y = above > 0 ? above : at.bottom + 8;
  Object.assign(told.style, { left: `${x - half + scrollX}px`, top: `${y + scrollY}px` });
};
const livens = (figure) => {
  const marks = all(".tip", figure).filter((mark) => {  // not what a part of the picture cuts off
    const part = mark.closest(".part")?.getBoundingClientRect(), { left, right, top } = mark.getBoundingClientRect();
    return !part || (right > part.left && left < part.right && top > part.top - 1 && top < part.bottom);
  });
  for (const mark of all(".tip", figure)) mark.inert = true;  // nothing in a slider takes the focus
  let shown;
  const open = (mark) => mark?.href && location.assign(mark.href);
  const show = (mark) => {
    shown = mark;
    for (const each of marks) each.classList.toggle("shown", each === mark);
    told.hidden = !mark;
    if (!mark) return;
    told.textContent = mark.dataset.tip;
    Object.assign(figure, { ariaValueNow: marks.indexOf(mark) + 1, ariaValueText: mark.dataset.tip });
    place(mark);
  };
  const nearest = ({ clientX: x, clientY: y }) => {  // the smallest bar under the pointer, or a point near it
    const far = marks.map((mark) => {
      const { left, right, top, bottom, width, height } = mark.getBoundingClientRect();
      const [dx, dy] = [Math.max(left - x, 0, x - right), Math.max(top - y, 0, y - bottom)];
      return Math.hypot(dx, dy) + (dx + dy ? 0 : width * height / 1e9);
    });
    const least = Math.min(...far);
    return least < 48 ? marks[far.indexOf(least)] : undefined;
  };
  Object.assign(figure, { role: "slider", tabIndex: 0, ariaValueMin: 1, ariaValueMax: marks.length, ariaValueNow: 1,
    ariaLabel: "Values in the figure: arrow keys, Enter opens a run" });
  figure.onpointermove = (event) => event.pointerType === "mouse" && show(nearest(event));
  figure.onpointerleave = ({ pointerType }) => pointerType === "mouse" && show();
  figure.addEventListener("focusout", ({ relatedTarget }) => figure.contains(relatedTarget) || show());
  figure.onclick = (event) => {  // of fingers the first tap shows, the second opens the run
    const mark = nearest(event), again = mark === shown;
    show(mark);
    if (again) open(mark);
  };
  figure.onkeydown = (event) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const at = marks.indexOf(shown), ends = { Home: 0, End: marks.length - 1 }[event.key];
    if (event.key === "Enter") open(shown);
    if (move === undefined && ends === undefined) return;
    event.preventDefault();
    show(marks[ends ?? Math.max(0, Math.min(marks.length - 1, at + move))]);
  };
};
// On a phone panels that stand beside each other come one below the other: parts of the same picture.
const stack = (figure) => {
  const { naturalWidth, naturalHeight } = figure.querySelector("img");
  const part = (crop) => {
    const [left, top, right, bottom] = crop.split(",").map((edge) => edge / 100);
    const style = `--left: ${left}; --top: ${top}; --wide: ${right - left}; --high: ${bottom - top}`;
    const copies = [...figure.childNodes].map((child) => child.cloneNode(true));
    return make("span", { className: "part", style }, make("span", {}, ...copies));
  };
  const panels = figure.dataset.panels.split(";").map((panel) =>
    make("span", { className: "panel" }, ...panel.split("|").map(part)));
  figure.style = `--width: ${naturalWidth}px; --shape: ${naturalWidth / naturalHeight}`;
  figure.classList.add("stacked");
  figure.replaceChildren(...panels);
};
for (const figure of all(".marked")) {
  figure.querySelector("img").decode().then(() => {
    if (figure.dataset.panels && innerWidth <= 640) stack(figure);
    if (figure.querySelector(".tip")) livens(figure);
  });
}

// All runs: of the two that are ticked what differs, and by how much.
const signed = (value, unit) => (value > 0 ? "+" : "−") + Number(Math.abs(value).toPrecision(3)) + unit;
const change = (key, ...texts) => {  // of two numbers
  const [a, b] = texts.map((text) => /^-?\d[\d.,]*(e[-+]\d+)?$/.test(text) ? number(text) : NaN), ratio = b / a;
  if (/loss$/.test(key) && a !== b) return Number.isNaN(b - a) ? "" : signed(b - a, " nats");
  if (!(ratio > 0 && ratio < Infinity)) return "";
  return Math.abs(ratio - 1) < 0.1 ? signed(100 * (ratio - 1), "%") : `${ratio.toPrecision(3)}x`;
};
const heading = document.querySelector("h1"), usual = document.title;
const compare = (box, said = "") => {
  const ticked = all("[data-run]:checked"), other = ticked.length > 2 && ticked.find((each) => each !== box);
  if (other) {  // it makes room for the new one
    other.checked = false;
    return compare(box, `Two at most: “${other.dataset.name}” is no longer ticked. `);
  }
  const [one, two] = ticked.map(({ dataset }) => facts.runs[dataset.run]);
  const rows = !two ? [] : Object.keys({ ...one, ...two }).flatMap((head) => {
    const [a, b] = [one[head] ?? {}, two[head] ?? {}];
    const keys = Object.keys({ ...a, ...b }).filter((key) => a[key] !== b[key]);
    const told = keys.map((key) => cells("td", key, a[key], b[key], change(key, a[key], b[key])));
    return keys.length ? [[make("th", { colSpan: 4 }, head)], ...told] : [];
  });
  const clear = (box) => make("button", { ariaLabel: `clear ${box.dataset.name}`, onclick: () => box.click() }, "×");
  const names = ticked.map((box) => make("th", {}, box.dataset.name, " ", clear(box)));
  const head = [...cells("th", "what differs"), ...names, ...cells("th", names[1] ? "change" : "tick another run")];
  const [first, ...rest] = [head, ...rows].map((row) => make("tr", {}, ...row));
  const table = make("table", {}, make("thead", {}, first), make("tbody", {}, ...rest));
  const note = make("p", {}, `${said}Two single runs. A number of the text that leads here is of all repeats, so it can differ.`);
  tool.replaceChildren(...two ? [note] : [], ...names.length ? [table] : []);
  document.title = heading.textContent = two ? ticked.map((box) => box.dataset.name).join(" and ") : usual;
};
for (const box of all("[data-run]")) box.onchange = () => compare(box);
for (const name of location.hash.slice(1).split(",").reverse()) {  // both runs of a number, the later one below
  const box = all("[data-run]").find(({ dataset }) => dataset.run === name);
  box?.closest("tbody").prepend(box.closest("tr"));
  box?.click();
}

if (window.top !== window) document.documentElement.className = "framed";

// Quarto's search fetches its index, which a browser refuses for a file on disk; a script (prepare.py) is let through.
if (location.protocol === "file:") window.fetch = async () => {
  await new Promise((onload) => document.head.append(make("script", { src: "search.js", onload })));
  return new Response(JSON.stringify(window.searchIndex));
};
window.shownWarning = true;  // that it cannot search
