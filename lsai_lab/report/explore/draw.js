// What all explorables share: controls, charts, an answer in words, a table of the values, and the
// two places where they are shown: a page of the report, and a widget in JupyterLab. Colors come from
// `lsai_lab/report/colors.py`: `COLORS` by what they mean, `PALETTE` for series.
export { COLORS, PALETTE } from "./colors.js";

export const make = (tag, facts = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), facts);
  node.append(...children);
  return node;
};

export const svg = (tag, facts = {}, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(facts)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

export const count = (value) => Math.round(value).toLocaleString("en");
export const gib = (size, places = Math.abs(size) < 99.95 ? 1 : 0) => size.toLocaleString("en", { useGrouping: false,
  minimumFractionDigits: places, maximumFractionDigits: places, roundingMode: "halfEven" });  // as Python rounds
export const amount = (value, unit) => {  // 16,384 FLOP as 16.4 KFLOP
  const [of, sign] = [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " K"]].find(([of]) => value >= of) ?? [1, " "];
  return digits(value / of) + sign + unit;
};
export const digits = (value, most = 3) => !value ? "0" : Math.abs(value) >= 10 ** most
  ? count(value) : String(Number(value.toPrecision(most)));
export const every = (of, change) => Object.fromEntries(Object.entries(of).map(([name, value]) => [name, change(value, name)]));
export const sum = (values) => values.reduce((a, b) => a + b, 0);

// What a slider of tokens says: its value is their logarithm, and they are multiples of 256.
export const tokensAt = (power) => 256 * Math.round(2 ** power / 256);

// The head and the body of a table; an empty cell holds a dash.
export const grid = (heads, rows) => {
  const line = (tag) => (row) => make("tr", {}, ...row.map((cell) => make(tag, {}, cell ?? "–")));
  return [make("thead", {}, line("th")(heads)), make("tbody", {}, ...rows.map(line("td")))];
};

// A picture, and functions that add to it.
export const canvas = (width, height, label) => {
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  const add = (tag, facts, ...children) => {
    const made = svg(tag, facts, ...children);
    node.append(made);
    return made;
  };
  return { node, add, text: (x, y, words, facts = {}) => add("text", { x, y, ...facts }, words) };
};

// How a slider's value is said: some stand for the power of two.
const SHOWN = { tokens: (power) => count(tokensAt(power)), whole: (power) => count(2 ** power),
  two: (power) => digits(2 ** power, 2) };

// One control: `choices` make a select, `range` ([least, most, step]) a slider, `entry` a field for a
// number, else a checkbox. `show`: a function that says a slider's value, or the name of one.
const control = (name, { label, choices, range, entry, value, show }) => {
  if (choices) {
    const options = choices.map((choice) => [choice].flat());
    const field = make("select", { name }, ...options.map(([of, words]) => new Option(words ?? of, of)));
    field.value = value ?? options[0][0];
    return { field, node: make("label", {}, label, field), read: () => field.value };
  }
  if (!range && !entry) {
    const field = make("input", { type: "checkbox", name, checked: Boolean(value) });
    return { field, node: make("label", { className: "tick" }, field, label), read: () => field.checked };
  }
  const [min, max, step] = range ?? [0, "", "any"], said = make("output");
  const field = make("input", { type: range ? "range" : "number", name, min, max, step, value });
  const read = () => Number(field.value);
  const tell = () => field.ariaValueText = said.textContent = (SHOWN[show] ?? show ?? String)(read());
  const words = range ? make("span", {}, `${label}: `, said) : label;
  return { field, read, tell: range && tell, node: make("label", {}, words, field) };
};

// Builds an explorable in `el`, of Python's `title`, `about`, and `fields`, the controls by name; those with `more`
// are folded. `update(values, view)` is called with what they say, at first, after each change, and when the width
// changes. The view has the
// `width`, `draw(...nodes)`, `say(...words)`, `list(heads, rows)`, `set(name, value)`, the fields, and
// `note(name, words)`, which says beside a field what becomes of its value. `off(name, when, value, words)`
// lets a field stand at `value`, and says why, `when` that is true, and returns it; `limit(name, most, words)`
// ends a slider at `most`, with words if it stands there before its usual end, and returns its value.
export const explorable = (el, { title, about, fields }, update) => {
  const made = every(fields, (field, name) => control(name, field));
  const nodes = (more) => Object.keys(made).filter((name) => Boolean(fields[name].more) === more).map((name) => made[name].node);
  const folded = make("details", {}, make("summary", {}, "More settings"), make("div", {}, ...nodes(true)));
  const form = make("form", { onsubmit: () => false }, ...nodes(false), ...folded.lastChild.childElementCount ? [folded] : []);
  const answer = make("p", { className: "answer", role: "status" }), picture = make("div");
  const table = make("table", { tabIndex: 0 }), values = make("details", {}, make("summary", {}, "Values"), table);
  el.classList.add("explore");
  el.replaceChildren(make("p", { className: "title" }, make("strong", {}, title), ` ${about}`), form, answer, picture, values);
  const view = {
    form, width: 0, picture, fields: every(made, ({ field }) => field),
    draw: (...nodes) => picture.replaceChildren(...nodes), say: (...words) => answer.replaceChildren(...words),
    list: (heads, rows) => table.replaceChildren(...grid(heads, rows)),
    off: (name, when, value, words) => {
      made[name].field.disabled = when;
      if (!when) return false;
      view.set(name, value);
      view.note(name, words);
      return true;
    },
    limit: (name, most, words) => {
      const { field } = made[name], [least, usual] = fields[name].range;
      field.max = Math.min(most, usual);
      field.disabled = Number(field.max) <= least;
      if (most < usual && field.value > field.max - field.step) view.note(name, words);
      return Number(field.value);
    },
    note: (name, words) => made[name].node.setAttribute("data-note", words),
    set: (name, value) => { made[name].field[made[name].field.type === "checkbox" ? "checked" : "value"] = value; },
  };
  view.again = () => {
    for (const { node } of Object.values(made)) node.removeAttribute("data-note");
    update(every(made, ({ read }) => read()), view);
    for (const { tell } of Object.values(made)) tell?.();
  };
  form.oninput = view.again;
  const measure = () => {
    const width = Math.max(280, Math.min(920, Math.floor(el.clientWidth || 700)) - 2);
    if (Math.abs(width - view.width) < 2) return;
    view.width = width;
    view.again();
  };
  measure();
  new ResizeObserver(measure).observe(el);
  return view;
};

// Between two rows, by a share: numbers, and objects and arrays of numbers.
export const mixed = (a, b, share) => {
  const known = a ?? b;
  if (typeof known === "number") return (a ?? 0) + share * ((b ?? 0) - (a ?? 0));
  if (typeof known !== "object") return b ?? a;
  const both = every({ ...a, ...b }, (_, key) => mixed(a?.[key], b?.[key], share));
  return Array.isArray(known) ? Object.values(both) : both;
};

// What rows in the order of their tokens say of a number of tokens: on a straight line between two.
export const between = (rows, tokens) => {
  const above = Math.max(1, rows.findIndex((row) => row.tokens >= tokens)), [a, b] = rows.slice(above - 1);
  return mixed(a, b, (tokens - a.tokens) / (b.tokens - a.tokens));
};

// A number on an axis: 10,000 as 10K.
const tick = (value) => value >= 1e4 ? `${digits(value / 1e3)}K` : digits(value);

const ticksOf = ([low, high], log, wanted) => {
  const [from, to] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
  const rough = (to - from) / wanted, unit = log ? 1 : 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((times) => times * unit >= rough) * unit, first = Math.ceil(from / step);
  return Array.from({ length: Math.floor(to / step + 1e-9) - first + 1 },
    (_, at) => log ? 10 ** ((first + at) * step) : (first + at) * step);
};

// A chart with axes. `x` and `y` are [low, high]; `log` names the logarithmic axes ("x", "xy").
// Returns its node, the scales `X` and `Y`, and functions that add marks.
export const chart = (width, height, { x, y, log = "", xlabel = "", ylabel = "", xticks, label, yticks, right = 12 }) => {
  const left = 46, bottom = 34, top = 18;
  const scale = ([low, high], [from, to], name) => (value) => {
    const of = log.includes(name) ? Math.log : (number) => number;
    return from + (of(value) - of(low)) / (of(high) - of(low)) * (to - from);
  };
  const X = scale(x, [left, width - right], "x"), Y = scale(y, [height - bottom, top], "y");
  const { node, add, text } = canvas(width, height, label);
  for (const [value, words] of yticks ?? ticksOf(y, log.includes("y"), 5).map((v) => [v, tick(v)])) {
    add("line", { x1: left, x2: width - right, y1: Y(value), y2: Y(value), class: "grid" });
    text(left - 5, Y(value) + 4, words, { "text-anchor": "end" });
  }
  for (const [value, words] of xticks ?? ticksOf(x, log.includes("x"), Math.max(3, width / 90)).map((v) => [v, tick(v)])) {
    text(Math.min(X(value), width - 3.6 * words.length), height - bottom + 15, words, { "text-anchor": "middle" });
  }
  text((left + width - right) / 2, height - 4, xlabel, { "text-anchor": "middle" });
  text(4, 11, ylabel);
  const path = (points) => points.map(([a, b], at) => `${at ? "L" : "M"}${X(a).toFixed(1)} ${Y(b).toFixed(1)}`).join("");
  return {
    node, X, Y, add, text,
    line: (points, color, facts = {}) => add("path", { d: path(points), fill: "none", stroke: color,
      "stroke-width": 2, ...facts }),
    area: (upper, lower, color) => add("path", { fill: color, stroke: "none",
      d: `${path([...upper, ...[...lower].reverse()])}Z` }),
    // names of lines, [words, x, y, facts], to the right of their ends and moved apart
    ends: (names) => names.sort((a, b) => b[2] - a[2]).reduce((last, [words, a, b, facts]) => {
      const place = Math.max(last + 13, Y(b) + 4);
      text(X(a) + 5, place, words, facts);
      return place;
    }, 0),
    dot: (a, b, color, facts = {}) => add("circle", { cx: X(a), cy: Y(b), r: 5, fill: color, ...facts }),
  };
};

// Names of colors, as a line of text.
export const legend = (pairs) => make("p", { className: "legend" }, ...pairs.map(([name, color]) =>
  make("span", {}, make("i", { style: `background: ${color}` }), name)));

// In JupyterLab. `ask(question)` is answered by Python.
export const widget = (draw) => ({
  render: ({ model, el }) => {
    const ask = (question) => new Promise((resolve) => {
      const number = Math.random();
      model.on("msg:custom", (said) => said.number === number && resolve(said.answer));
      model.send({ number, question });
    });
    draw(el, model.get("data"), ask);
  },
});

// On a page of the report: in every place that is meant for it and has it not yet.
export const onPage = (name, draw, data) => {
  for (const el of document.querySelectorAll(`[data-explore="${name}"]:not(:has(form))`)) draw(el, data);
};
