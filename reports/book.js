// Both engines' pages: tables sort, filter and save as CSV; the page without Quarto has a search; two runs stand side by side. No network.
(() => {
  if (location.hash === "#live" || sessionStorage.live) {  // `lsai report --watch` serves the page and makes it anew
    sessionStorage.live = "yes";
    let seen = null;
    setInterval(async () => {
      const now = (await fetch(location.pathname, { method: "HEAD", cache: "no-store" })).headers.get("Last-Modified");
      if (seen && now !== seen) location.reload();
      seen = now;
    }, 1000);
  }
  const make = (tag, facts = {}, ...children) => { const node = Object.assign(document.createElement(tag), facts); node.append(...children); return node; };
  const body = (table) => table.tBodies[0];
  const text = (cell) => cell ? cell.textContent.trim() : "";
  const value = (shown) => { const number = parseFloat(shown.replace(/,(?=\d{3})/g, "")); return /^[-+±~]?[\d.]/.test(shown) && !isNaN(number) ? number : null; };
  const order = (a, b) => {
    const [x, y] = [value(a), value(b)];
    return x !== null && y !== null ? x - y : x !== null ? -1 : y !== null ? 1 : a.localeCompare(b);
  };

  for (const table of document.querySelectorAll("main table")) {
    const head = table.tHead && table.tHead.rows[0];
    if (!head || !body(table) || body(table).rows.length < 2) continue;
    table.classList.add("enhanced");
    [...head.cells].forEach((cell, column) => {
      const button = make("button", { type: "button", title: "Sort by this column" }, ...cell.childNodes);
      cell.replaceChildren(button);
      button.addEventListener("click", () => {
        const falling = cell.getAttribute("aria-sort") === "ascending";
        for (const other of head.cells) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", falling ? "descending" : "ascending");
        const rows = [...body(table).rows].sort((a, b) => order(text(a.cells[column]), text(b.cells[column])) * (falling ? -1 : 1));
        body(table).append(...rows);
      });
    });
    const tools = make("div", { className: "tools" });
    if (body(table).rows.length > 6) {
      const filter = make("input", { type: "search", placeholder: "Filter rows", ariaLabel: "Filter the rows of this table" });
      filter.addEventListener("input", () => {
        const terms = filter.value.toLowerCase().split(/\s+/);
        for (const row of body(table).rows) row.hidden = !terms.every((term) => row.textContent.toLowerCase().includes(term));
      });
      tools.append(filter);
    }
    const cell = (item) => '"' + text(item).replace(/ [▲▼]$/, "").replaceAll('"', '""') + '"';
    const csv = [head, ...body(table).rows].map((row) => [...row.cells].map(cell).join(",")).join("\r\n");
    const name = (table.closest("[id^=tbl-]") || { id: "table" }).id;
    tools.append(make("a", { href: "data:text/csv;charset=utf-8," + encodeURIComponent(csv), download: name + ".csv", textContent: "CSV" }));
    (table.closest(".table-box") || table).after(tools);
  }

  const input = document.getElementById("search"), results = document.getElementById("results"), toc = document.getElementById("toc");
  if (input) {
    const contents = document.getElementById("contents");
    if (matchMedia("(max-width: 60rem)").matches) contents.open = false;
    const units = [];
    for (const node of document.querySelectorAll("main > *")) {
      if (/^H[1-4]$/.test(node.tagName) && node.id) units.push({ id: node.id, title: node.textContent.trim(), text: "" });
      else if (units.length && !node.matches("details.code, header")) units.at(-1).text += " " + node.textContent.replace(/\s+/g, " ");
    }
    const found = (unit, terms) => terms.every((term) => (unit.title + unit.text).toLowerCase().includes(term));
    const show = (unit, terms) => {
      const at = Math.max(0, unit.text.toLowerCase().indexOf(terms[0]) - 40), piece = unit.text.slice(at, at + 140);
      const link = make("a", { href: "#" + unit.id }, make("strong", { textContent: unit.title }));
      const start = piece.toLowerCase().indexOf(terms[0]);
      if (start < 0) link.append(piece);
      else link.append(piece.slice(0, start), make("mark", { textContent: piece.slice(start, start + terms[0].length) }), piece.slice(start + terms[0].length));
      return link;
    };
    input.addEventListener("input", () => {
      const terms = input.value.toLowerCase().split(/\s+/).filter((term) => term.length > 1);
      const hits = terms.length ? units.filter((unit) => found(unit, terms)) : [];
      results.hidden = !terms.length; toc.hidden = Boolean(terms.length);
      results.replaceChildren(make("p", { textContent: hits.length ? `${hits.length} places` : "Nothing found." }), ...hits.slice(0, 50).map((unit) => show(unit, terms)));
    });
    input.addEventListener("keydown", (event) => { if (event.key === "Escape") { input.value = ""; input.dispatchEvent(new Event("input")); } });
  }

  const facts = document.getElementById("runs-data");
  if (facts) {
    const runs = JSON.parse(facts.textContent), chosen = [], box = document.getElementById("comparison");
    const short = (item) => item === undefined ? "–" : typeof item === "number" && !Number.isInteger(item) ? String(Number(item.toPrecision(5))) : String(item);
    const compare = () => {
      box.replaceChildren();
      if (chosen.length < 2) { box.append(chosen.length ? "Choose a second run." : "Choose two runs to see what differs."); return; }
      const [a, b] = chosen.map((name) => runs[name]);
      const keys = [...new Set([...Object.keys(a), ...Object.keys(b)])].filter((key) => JSON.stringify(a[key]) !== JSON.stringify(b[key]));
      const row = (tag, cells) => make("tr", {}, ...cells.map((cell) => make(tag, { textContent: cell })));
      box.append(make("table", {}, make("thead", {}, row("th", ["what differs", ...chosen])), make("tbody", {}, ...keys.map((key) => row("td", [key, short(a[key]), short(b[key])])))));
    };
    document.querySelector("main").addEventListener("change", (event) => {
      const name = event.target.dataset.run;
      if (!name) return;
      if (event.target.checked) chosen.push(name); else chosen.splice(chosen.indexOf(name), 1);
      while (chosen.length > 2) document.querySelector(`[data-run="${CSS.escape(chosen.shift())}"]`).checked = false;
      compare();
    });
    compare();
  }
})();
