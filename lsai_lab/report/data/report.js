// Contents that follow the reader, and a search over the full text, on the pages of both engines. No library, no network.
(() => {
  const main = document.querySelector("main");
  const input = document.getElementById("search");
  const results = document.getElementById("results");
  const toc = document.getElementById("toc");
  const panel = document.getElementById("contents");
  const narrow = matchMedia("(max-width: 60rem)");

  // Quarto's page comes with the panel at its end. The panel takes up Quarto's contents and goes to their place, on a narrow
  // window (where Quarto shows no contents) above the text.
  const quarto = document.getElementById("TOC");
  if (quarto) {
    const sidebar = quarto.parentElement;
    toc.append(quarto);
    const place = () => (getComputedStyle(sidebar).display === "none" ? main : sidebar).prepend(panel);
    addEventListener("resize", place);
    place();
  }
  if (narrow.matches) panel.open = false;
  // pandoc gives the address to a heading, Quarto to the section that it opens.
  const address = (heading) => heading.id || (heading.parentElement.matches("section[id]") ? heading.parentElement.id : "");

  // One searchable unit per heading: the text up to the next heading; a run card in the appendix is a unit of its own.
  const units = [];
  let unit = null;
  const text = (node) => {
    const copy = node.cloneNode(true);
    for (const hidden of copy.querySelectorAll("annotation, details.code")) hidden.remove();
    return copy.matches("details.code") ? "" : copy.textContent;
  };
  const walk = (node) => {
    for (const child of node.children) {
      if (child === panel || child.matches("header, footer, script, style")) continue;
      if (child.matches("h1, h2, h3, h4") && address(child)) {
        unit = { id: address(child), title: child.textContent.trim(), text: "" };
        units.push(unit);
      } else if (child.matches(".run-card[id]")) {
        units.push({ id: child.id, title: child.querySelector("strong").textContent.trim(), text: text(child) });
      } else if (child.matches("section, main") || child.querySelector("h1, h2, h3, h4, .run-card[id]")) {
        walk(child);
      } else if (unit) {
        unit.text += " " + text(child);
      }
    }
  };
  walk(main);
  for (const entry of units) {
    entry.text = entry.text.replace(/\s+/g, " ").trim();
    entry.folded = (entry.title + " " + entry.text).toLowerCase();
  }

  const snippet = (entry, terms, target) => {
    const at = Math.max(0, Math.min(...terms.map((term) => entry.text.toLowerCase().indexOf(term)).filter((i) => i >= 0)));
    const from = Number.isFinite(at) ? Math.max(0, at - 40) : 0;
    const piece = (from ? "… " : "") + entry.text.slice(from, from + 130) + (from + 130 < entry.text.length ? " …" : "");
    const pattern = new RegExp("(" + terms.map((term) => term.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|") + ")", "gi");
    piece.split(pattern).forEach((part, index) => {
      const node = index % 2 ? document.createElement("mark") : document.createTextNode(part);
      if (index % 2) node.textContent = part;
      target.append(node);
    });
  };

  const highlight = (terms) => {
    if (!window.CSS || !CSS.highlights || !window.Highlight) return;
    CSS.highlights.delete("search");
    if (!terms.length) return;
    const ranges = [];
    const walker = document.createTreeWalker(main, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node && ranges.length < 2000; node = walker.nextNode()) {
      const lower = node.data.toLowerCase();
      for (const term of terms) {
        for (let at = lower.indexOf(term); at >= 0; at = lower.indexOf(term, at + term.length)) {
          const range = document.createRange();
          range.setStart(node, at);
          range.setEnd(node, Math.min(at + term.length, node.length));
          ranges.push(range);
        }
      }
    }
    CSS.highlights.set("search", new Highlight(...ranges));
  };

  const search = () => {
    const terms = input.value.toLowerCase().split(/\s+/).filter((term) => term.length > 1);
    results.hidden = !terms.length;
    toc.hidden = Boolean(terms.length);
    results.replaceChildren();
    highlight(terms);
    if (!terms.length) return;
    const found = units.filter((entry) => terms.every((term) => entry.folded.includes(term)));
    const count = document.createElement("p");
    count.textContent = found.length ? `${found.length} ${found.length > 1 ? "places" : "place"}` : "Nothing found.";
    results.append(count);
    for (const entry of found.slice(0, 50)) {
      const link = document.createElement("a");
      link.href = "#" + encodeURIComponent(entry.id);
      const title = document.createElement("strong");
      title.textContent = entry.title;
      link.append(title);
      snippet(entry, terms, link);
      results.append(link);
    }
  };
  input.addEventListener("input", search);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { input.value = ""; search(); }
  });

  // A link to a run opens that run's provenance.
  const reveal = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (const fold of target.querySelectorAll("details.provenance")) fold.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();

  // On a phone the contents fold away once a place is chosen.
  panel.addEventListener("click", (event) => {
    if (narrow.matches && event.target.closest("a[href^='#']")) panel.open = false;
  });

  const entries = new Map([...toc.querySelectorAll("a[href^='#']")].map((a) => [decodeURIComponent(a.hash.slice(1)), a]));
  const headings = [...main.querySelectorAll("h1, h2, h3")].filter((heading) => entries.has(address(heading)));
  let current = null;
  const follow = () => {
    let heading = headings[0];
    for (const candidate of headings) {
      if (candidate.getBoundingClientRect().top > 120) break;
      heading = candidate;
    }
    const entry = heading && entries.get(address(heading));
    if (!entry || entry === current) return;
    if (current) current.removeAttribute("aria-current");
    entry.setAttribute("aria-current", "true");
    current = entry;
    if (!narrow.matches) {
      const bar = panel.parentElement;
      const top = entry.getBoundingClientRect().top;
      if (top < 40 || top > bar.clientHeight - 40) bar.scrollTop += top - bar.clientHeight / 2;
    }
  };
  addEventListener("scroll", () => requestAnimationFrame(follow), { passive: true });
  follow();
})();
