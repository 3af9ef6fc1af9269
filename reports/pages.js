// Pages without Quarto, with the helpers of book.js: search through all chapters, from search.js as soon as somebody
// searches; the section in sight is marked in the contents.
const contents = document.getElementById("TOC"), lists = contents.querySelector("details");
lists.open = matchMedia("(min-width: 64rem)").matches;
const field = make("input", { type: "search", placeholder: "Search the report", ariaLabel: "Search the report" });
const found = make("div", { role: "status" });
contents.prepend(field);
lists.before(found);
const search = () => {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  const has = (...parts) => words.length && words.every((word) => parts.join(" ").toLowerCase().includes(word));
  // headings before terms that are explained, these before the rest
  const rank = ({ title, terms, text }) => has(title) ? 0 : has(terms) ? 1 : has(title, terms, text) ? 2 : 3;
  const hits = (window.searchIndex ?? []).filter((hit) => rank(hit) < 3).sort((a, b) => rank(a) - rank(b)).slice(0, 20);
  found.replaceChildren(make("ul", {}, ...hits.map(({ href, title, text }) => {
    const at = text.toLowerCase().indexOf(words[0]) - 40, from = at > 0 ? text.indexOf(" ", at) + 1 : 0;  // whole words
    const near = make("small", {}, `… ${text.slice(from, from + 110).replace(/\s\S*$/, "")} …`);
    return make("li", {}, make("a", { href }, title, near));
  })));
  if (words.length && !hits.length) found.textContent = window.searchIndex ? "Nothing found." : "Reading the report ...";
  lists.hidden = words.length > 0;
};
field.addEventListener("input", search);
field.addEventListener("focus", () => document.head.append(make("script", { src: "search.js", onload: search })), { once: true });
const here = new Map([...lists.querySelectorAll("ul ul a")].map((link) => [link.hash.slice(1), link]));
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting || !here.has(target.id)) continue;
    for (const [id, link] of here) link.ariaCurrent = id === target.id ? "true" : null;
  }
}, { rootMargin: "0px 0px -70% 0px" });
all("main section[id]").forEach((section) => watcher.observe(section));
