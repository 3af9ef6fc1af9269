// Pages without Quarto: search through all chapters, from search.js; the section in sight is marked in the contents.
const contents = document.getElementById("TOC"), lists = contents.querySelector("details");
lists.open = matchMedia("(min-width: 68rem)").matches;
const field = Object.assign(document.createElement("input"),
  { type: "search", placeholder: "Search the book", ariaLabel: "Search the book" });
const found = Object.assign(document.createElement("div"), { role: "status" });
contents.prepend(field);
lists.before(found);
field.addEventListener("input", () => {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  const hits = !words.length ? [] : (window.searchIndex ?? []).filter(({ title, text }) =>
    words.every((word) => `${title} ${text}`.toLowerCase().includes(word))).slice(0, 20);
  const list = document.createElement("ul");
  list.append(...hits.map(({ href, title, text }) => {
    const link = Object.assign(document.createElement("a"), { href, textContent: title });
    const at = Math.max(0, text.toLowerCase().indexOf(words[0]) - 40);
    link.append(Object.assign(document.createElement("small"), { textContent: `… ${text.slice(at, at + 110)} …` }));
    const item = document.createElement("li");
    item.append(link);
    return item;
  }));
  found.replaceChildren(list);
  if (words.length && !hits.length) found.textContent = "Nothing found.";
  lists.hidden = words.length > 0;
});
const here = new Map([...lists.querySelectorAll("ul ul a")].map((link) => [link.hash.slice(1), link]));
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting || !here.has(target.id)) continue;
    for (const link of here.values()) link.removeAttribute("aria-current");
    here.get(target.id).setAttribute("aria-current", "true");
  }
}, { rootMargin: "0px 0px -70% 0px" });
for (const section of document.querySelectorAll("main section[id]")) watcher.observe(section);
