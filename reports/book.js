// Both engines' pages: tables sort, filter and save as CSV; marks of figures say what they are; search on file://; two runs side by side.
const make = (tag, facts = {}, ...children) => { const node = Object.assign(document.createElement(tag), facts); node.append(...children); return node; };
const text = (cell) => cell ? cell.textContent.trim() : "";
const number = (shown) => /^[-+±~]?[\d.]/.test(shown) ? parseFloat(shown.replace(/,(?=\d{3})/g, "")) : NaN;
const order = (a, b) => {
  const [x, y] = [number(a), number(b)];
  return isNaN(x) && isNaN(y) ? a.localeCompare(b) : isNaN(x) ? 1 : isNaN(y) ? -1 : x - y;
};
const has = (terms, words) => { const held = words.toLowerCase(); return terms.toLowerCase().split(/\s+/).every((term) => held.includes(term)); };

for (const table of document.querySelectorAll(".table-box > table")) {
  const head = table.tHead && table.tHead.rows[0], body = table.tBodies[0];
  if (!head || !body || body.rows.length < 2) continue;
  const csv = [...table.rows].map((row) => [...row.cells].map((cell) => '"' + text(cell).replaceAll('"', '""') + '"').join(",")).join("\r\n");
  [...head.cells].forEach((cell, column) => {
    const button = make("button", { type: "button", title: "Sort by this column" }, ...cell.childNodes);
    cell.replaceChildren(button);
    button.onclick = () => {
      const sign = cell.ariaSort === "ascending" ? -1 : 1;
      for (const other of head.cells) other.removeAttribute("aria-sort");
      cell.ariaSort = sign > 0 ? "ascending" : "descending";
      body.append(...[...body.rows].sort((a, b) => order(text(a.cells[column]), text(b.cells[column])) * sign));
    };
  });
  const tools = make("div", { className: "tools" });
  if (body.rows.length > 6) {
    const filter = make("input", { type: "search", placeholder: "Filter the rows", ariaLabel: "Filter the rows of this table" });
    filter.oninput = () => { for (const row of body.rows) row.hidden = !has(filter.value, row.textContent); };
    tools.append(filter);
  }
  const name = (table.closest("[id^=tbl-]") || { id: "table" }).id + ".csv";
  tools.append(make("a", { href: "data:text/csv;charset=utf-8," + encodeURIComponent(csv), download: name, textContent: "CSV" }));
  table.parentElement.before(tools);
}

for (const wide of document.querySelectorAll("math[display=block], pre")) wide.tabIndex = 0;  // they scroll where the window is narrow

const tip = make("div", { className: "tip", hidden: true });
document.body.append(tip);
document.addEventListener("pointerover", (event) => {
  const circle = event.target.closest(".marked circle"), title = circle && circle.querySelector("title");
  if (title) { circle.dataset.text = title.textContent; title.remove(); }
  tip.hidden = !circle;
  tip.textContent = circle ? circle.dataset.text : "";
  tip.style.cssText = `left: min(${event.clientX + 12}px, 100vw - 16rem); top: ${event.clientY + 12}px`;
});

// The page without Quarto has no search of its own.
const contents = document.querySelector("body > nav#TOC");
if (contents) {
  const units = [...document.querySelectorAll("h1[id], h2[id], h3[id]")].map((start) => {
    const unit = { href: "#" + start.id, title: text(start), words: text(start) };
    for (let next = start.nextElementSibling; next && !/^H[1-3]$/.test(next.tagName); next = next.nextElementSibling) unit.words += " " + next.textContent;
    return unit;
  });
  const input = make("input", { type: "search", id: "search", placeholder: "Search", ariaLabel: "Search the report" });
  const results = make("div", { id: "results", role: "status" });
  input.oninput = () => {
    const wanted = input.value.trim(), hits = wanted ? units.filter((unit) => has(wanted, unit.words)) : [];
    results.replaceChildren(...hits.map((unit) => make("a", { href: unit.href, textContent: unit.title })));
    if (wanted && !hits.length) results.textContent = "Nothing found.";
  };
  contents.prepend(input, results);
}

if (location.hash === "#live" || sessionStorage.live) {  // `lsai report --watch` serves the page and makes it anew
  sessionStorage.live = "yes";
  let seen = null;
  setInterval(async () => {
    const now = (await fetch(location.pathname, { method: "HEAD", cache: "no-store" })).headers.get("Last-Modified");
    if (seen && now !== seen) location.reload();
    seen = now;
  }, 1000);
}

const data = document.getElementById("runs-data");
if (data) {
  const runs = JSON.parse(data.textContent), chosen = [], box = document.getElementById("comparison");
  document.querySelector("main").addEventListener("change", ({ target }) => {
    if (!target.dataset.run) return;
    if (target.checked) chosen.push(target.dataset.run); else chosen.splice(chosen.indexOf(target.dataset.run), 1);
    while (chosen.length > 2) document.querySelector(`[data-run="${CSS.escape(chosen.shift())}"]`).checked = false;
    const [a, b] = chosen.map((name) => runs[name] || {});
    const row = (tag, ...cells) => make("tr", {}, ...cells.map((cell) => make(tag, { textContent: cell ?? "–" })));
    const keys = b ? Object.keys({ ...a, ...b }).filter((key) => a[key] !== b[key]) : [];
    box.replaceChildren(b ? make("table", {}, row("th", "what differs", ...chosen), ...keys.map((key) => row("td", key, a[key], b[key]))) : "Choose a second run.");
  });
}
