// Both engines' pages: tables sort and filter, the contents of the page without Quarto are searched, two runs stand side by side.
const make = (tag, facts = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), facts);
  node.append(...children);
  return node;
};
const search = (label, show) => make("input", { type: "search", placeholder: label, ariaLabel: label, oninput: ({ target }) => show(target.value) });
const has = (node, words) => words.toLowerCase().split(/\s+/).every((word) => node.textContent.toLowerCase().includes(word));
const number = (shown) => /^[-+±~]?[\d.]/.test(shown) ? parseFloat(shown.replace(/,(?=\d{3})/g, "")) : Infinity;

for (const table of document.querySelectorAll(".table-box > table")) {
  const body = table.tBodies[0];
  if (!table.tHead || !body || body.rows.length < 2) continue;
  for (const cell of table.tHead.rows[0].cells) {
    const button = make("button", { type: "button", title: "Sort by this column" }, ...cell.childNodes);
    cell.append(button);
    button.onclick = () => {
      const sign = cell.ariaSort === "ascending" ? -1 : 1, text = (row) => row.cells[cell.cellIndex].textContent.trim();
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      cell.ariaSort = sign > 0 ? "ascending" : "descending";
      const order = (a, b) => number(a) - number(b) || a.localeCompare(b);  // words after numbers
      body.append(...[...body.rows].sort((a, b) => sign * order(text(a), text(b))));
    };
  }
  if (body.rows.length > 6) table.parentElement.before(search("Filter the rows", (words) => {
    for (const row of body.rows) row.hidden = !has(row, words);
  }));
}

for (const wide of document.querySelectorAll("math[display=block], pre")) wide.tabIndex = 0;  // they scroll where the window is narrow

const contents = document.querySelector("nav#TOC:not(.toc-active)");
if (contents) contents.prepend(search("Search", (words) => {
  for (const link of contents.querySelectorAll("a")) link.parentElement.hidden = !has(document.getElementById(link.hash.slice(1)), words);
}));

if (location.hash === "#live" || sessionStorage.live) {  // `lsai report --watch` serves the page and makes it anew
  sessionStorage.live = "yes";
  let seen = null;
  setInterval(async () => {
    const now = (await fetch(location.pathname, { method: "HEAD", cache: "no-store" })).headers.get("Last-Modified");
    if (seen && now !== seen) location.reload();
    seen = now;
  }, 1000);
}

const comparison = document.getElementById("comparison");
if (comparison) {
  const runs = JSON.parse(document.getElementById("runs-data").textContent);
  const row = (tag, ...cells) => make("tr", {}, ...cells.map((cell) => make(tag, { textContent: cell ?? "–" })));
  document.addEventListener("change", () => {
    const names = [...document.querySelectorAll("[data-run]:checked")].map((box) => box.dataset.run);
    const [a, b] = names.map((name) => runs[name] || {});
    const differing = b ? Object.keys({ ...a, ...b }).filter((key) => a[key] !== b[key]) : [];
    const rows = differing.map((key) => row("td", key, ...names.map((name) => runs[name]?.[key])));
    comparison.replaceChildren(names.length < 2 ? "Choose a second run." : make("table", {}, row("th", "what differs", ...names), ...rows));
  });
}
