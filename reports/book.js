// Both engines' pages: tables sort and filter, the contents of the page without Quarto are searched, two runs stand side by side.
const make = (tag, facts, ...children) => {
  const node = Object.assign(document.createElement(tag), facts);
  node.append(...children);
  return node;
};
const search = (label, show) => make("input", { type: "search", placeholder: label, ariaLabel: label, oninput: ({ target }) => show(target.value) });
const has = (node, words) => words.toLowerCase().split(/\s+/).every((word) => node.textContent.toLowerCase().includes(word));
const number = (shown) => /^[-+±~]?[\d.]/.test(shown) ? parseFloat(shown.replace(/,(?=\d{3})/g, "")) : Infinity;

for (const table of document.querySelectorAll("main table:has(thead)")) {
  const rows = [...table.tBodies[0].rows];
  for (const cell of table.tHead.rows[0].cells) {
    cell.append(make("button", { type: "button", title: "Sort by this column", onclick: () => {
      const sign = cell.ariaSort === "ascending" ? -1 : 1, text = (row) => row.cells[cell.cellIndex].textContent.trim();
      for (const other of cell.parentElement.cells) other.ariaSort = other === cell ? sign > 0 ? "ascending" : "descending" : null;
      const order = (a, b) => number(a) - number(b) || a.localeCompare(b);  // words after numbers
      table.tBodies[0].append(...rows.sort((a, b) => sign * order(text(a), text(b))));
    } }, ...cell.childNodes));
  }
  if (rows.length > 6) table.before(search("Filter the rows", (words) => rows.forEach((row) => row.hidden = !has(row, words))));
}
for (const wide of document.querySelectorAll("main table, math[display=block], pre")) wide.tabIndex = 0;  // they scroll where the window is narrow

const contents = document.querySelector("nav#TOC:not(.toc-active)");
contents?.prepend(search("Search", (words) => {
  for (const link of contents.querySelectorAll("a")) link.parentElement.hidden = !has(document.getElementById(link.hash.slice(1)), words);
}));

const runs = JSON.parse(document.getElementById("runs-data")?.textContent ?? "{}");
document.addEventListener("change", ({ target }) => {
  const names = [...document.querySelectorAll("[data-run]:checked")].map((box) => box.dataset.run), [a, b] = names.map((name) => runs[name]);
  if (!target.dataset.run || !b) return;
  const row = (tag, cells) => make("tr", {}, ...cells.map((cell) => make(tag, { textContent: cell ?? "–" })));
  const differing = Object.keys({ ...a, ...b }).filter((key) => a[key] !== b[key]).map((key) => row("td", [key, ...names.map((name) => runs[name][key])]));
  document.getElementById("comparison").replaceChildren(make("table", {}, row("th", ["what differs", ...names]), ...differing));
});

// Quarto's search fetches its index, which a browser refuses for files on disk; as a script (prepare.py makes it) it is let through.
const fetchOther = window.fetch, script = (src) => new Promise((onload, onerror) => document.head.append(make("script", { src, onload, onerror })));
window.fetch = (address, ...options) => String(address).endsWith("search.json")
  ? script("search.js").then(() => new Response(JSON.stringify(window.searchIndex))) : fetchOther(address, ...options);
window.shownWarning = true;  // that it cannot search

let seen;  // `lsai report --watch` serves the page and makes it anew
if (location.hostname === "127.0.0.1") setInterval(async () => {
  const now = (await fetch(location.pathname, { method: "HEAD", cache: "no-store" })).headers.get("Last-Modified");
  if (now !== (seen ??= now)) location.reload();
}, 1000);
