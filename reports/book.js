// Both engines' pages: tables sort and filter, the contents of the page without Quarto are searched, runs are compared.
const make = (tag, facts, ...children) => {
  const node = Object.assign(document.createElement(tag), facts);
  node.append(...children);
  return node;
};
const filter = (label, nodes, meant = (node) => node) => {  // hides those of which what is meant lacks a word
  const has = (node, word) => meant(node).textContent.toLowerCase().includes(word);
  const show = (words) => nodes.forEach((node) => node.hidden = !words.every((word) => has(node, word)));
  const oninput = ({ target }) => show(target.value.toLowerCase().split(/\s+/));
  return make("input", { type: "search", placeholder: label, ariaLabel: label, oninput });
};
const number = (text) => /^[-+±~]?[\d.]/.test(text) ? parseFloat(text.replace(/,(?=\d{3})/g, "")) : Infinity;

for (const table of document.querySelectorAll("main table:has(thead)")) {
  const rows = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
  const onclick = ({ currentTarget: { parentElement: head } }) => {
    const sign = head.ariaSort === "ascending" ? -1 : 1, text = (row) => row.cells[head.cellIndex].textContent.trim();
    for (const other of heads) other.ariaSort = other !== head ? null : sign > 0 ? "ascending" : "descending";
    const order = (a, b) => number(a) - number(b) || a.localeCompare(b);  // words after numbers
    table.tBodies[0].append(...rows.sort((a, b) => sign * order(text(a), text(b))));
  };
  for (const head of heads) head.append(make("button", { title: "Sort by this column", onclick }, ...head.childNodes));
  if (rows.length > 12) table.before(filter("Filter the rows", rows));
  const fits = (row) => ({ lastChild: { value }, cellIndex }) => !value || row.cells[cellIndex].textContent === value;
  const onchange = () => rows.forEach((row) => row.style.display = heads.every(fits(row)) ? "" : "none");
  for (const head of document.querySelector("#comparison:not(:empty)") ? heads : []) {  // many: choose by column
    const kinds = [...new Set(rows.map((row) => row.cells[head.cellIndex].textContent))], first = head.dataset.chosen;
    if (kinds.length < 2 || kinds.length > 20) continue;
    const option = (value) => make("option", { value, textContent: value || "any", selected: value === first });
    const options = ["", ...kinds.sort((a, b) => number(a) - number(b))].map(option);
    head.append(make("select", { ariaLabel: `choose ${head.textContent}`, onchange }, ...options));
    if (first) onchange();
  }
}
for (const wide of document.querySelectorAll("main table, math[display=block], pre, figure"))
  if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;  // it scrolls

if (window.top !== window) document.documentElement.className = "framed";

const contents = document.querySelector("nav#TOC:not(.toc-active)");
const section = (item) => document.getElementById(item.firstChild.hash.slice(1));
contents?.prepend(filter("Search", contents.querySelectorAll("li"), section));

const runs = JSON.parse(document.getElementById("runs-data")?.textContent ?? "{}");
document.addEventListener("change", () => {
  const names = [...document.querySelectorAll("[data-run]:checked")].map((box) => box.dataset.run).slice(0, 2);
  const [a, b] = names.map((name) => runs[name]);
  if (!b) return;
  const row = (tag, cells) => make("tr", {}, ...cells.map((cell) => make(tag, { textContent: cell ?? "–" })));
  const differing = Object.keys({ ...a, ...b }).filter((key) => a[key] !== b[key]);
  const rows = [row("th", ["what differs", ...names]), ...differing.map((key) => row("td", [key, a[key], b[key]]))];
  document.getElementById("comparison").replaceChildren(make("table", {}, ...rows));
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
