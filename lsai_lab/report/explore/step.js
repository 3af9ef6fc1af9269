import { COLORS, count, digits, explorable, legend, make, svg } from "./draw.js";

export const draw = (el, { steps, about }) => {
  const classes = Object.keys(steps[0].classes);
  let known = 1, round = 0, told = "";  // steps that have been looked at, from the first on; the last chosen
  const reveal = make("button", { type: "button" }, "Show what was measured");
  const ticks = Object.fromEntries(steps.slice(1).map(({ name }) => [name, { label: name, value: false }]));
  const slowest = steps[0].tokens_per_s;
  const page = explorable(el, "Build the step.", `${about}. Tick a change, guess, then look.`, {
    ...ticks,
    guess: { label: "your guess (tokens/s)", range: [0.8, 2, 0.01], value: 1, show: (times) =>
      `${count(times * slowest)}, ${times.toFixed(2)}x eager` },
  }, (now, page) => {
    const names = steps.map(({ name }) => name), last = names.reduce((last, name, at) =>
      now[name] ? at : last, 0);
    const step = steps[last], hidden = last >= known;
    for (const name of names.slice(1)) page.set(name, names.indexOf(name) <= last);
    reveal.disabled = page.fields.guess.disabled = !hidden;
    const before = steps[Math.max(0, last - 1)];
    if (hidden && round !== last) page.set("guess", before.tokens_per_s / slowest);
    round = last;
    page.say(hidden ? `${told}${step.name}: ${step.about}. How many tokens/s will the step reach? Before the change it was `
      + `${count(before.tokens_per_s)}.` : `${told}${step.name}: ${digits(step.step_ms, 4)} ms a step, `
      + `${count(step.tokens_per_s)} tokens/s (${(step.tokens_per_s / slowest).toFixed(2)}x eager), `
      + `${count(step.clock_mhz)} MHz, ${count(step.watts)} W, ${digits(1e3 * step.joules_per_token)} mJ per token, `
      + `peak ${step.peak_gib.toFixed(1)} GiB.`);
    told = "";
    const shown = steps.slice(0, hidden ? last : last + 1), row = 40, right = 92, width = page.width;
    const scale = (width - right) / steps[0].step_ms;
    const node = svg("svg", { width, height: (last + 1) * row + 6, role: "img",
      "aria-label": `Milliseconds of ${shown.length} steps by class of kernel` });
    shown.forEach((each, at) => {
      let end = 0;
      node.append(svg("text", { x: 0, y: at * row + 13 }, each.name));
      for (const name of classes.filter((name) => each.classes[name] > 0)) {
        const size = each.classes[name] * scale;
        node.append(svg("rect", { x: end, y: at * row + 17, width: size, height: 19, fill: COLORS[name] },
          svg("title", {}, `${name}: ${digits(each.classes[name])} ms`)));
        end += size;
      }
      node.append(svg("text", { x: end + 6, y: at * row + 31 }, `${digits(each.step_ms, 4)} ms`));
    });
    if (hidden) node.append(svg("text", { x: 0, y: last * row + 26 }, `${step.name}: ?`));
    page.draw(legend(classes.map((name) => [name, COLORS[name]])), node);
    page.list(["step", "ms", "tokens/s", "MHz", "W", "mJ per token", "peak GiB", ...classes], shown.map((each) =>
      [each.name, each.step_ms, each.tokens_per_s, each.clock_mhz, each.watts, digits(1e3 * each.joules_per_token, 4),
        each.peak_gib, ...classes.map((name) => each.classes[name] ?? 0)]));
  });
  steps.slice(1).forEach(({ name }, at) => page.fields[name].addEventListener("input", () => {
    const later = steps.slice(at + 2).filter((step) => page.fields[step.name].checked);
    if (later.length) told = `Each change keeps those before it, so the later ones go with ${name}. `;
    for (const step of later) page.set(step.name, false);
  }));
  reveal.onclick = () => {
    const last = steps.reduce((last, { name }, at) => page.fields[name]?.checked ? at : last, 0);
    const off = page.fields.guess.value * slowest / steps[last].tokens_per_s - 1;
    told = Math.abs(off) < 0.02 ? "Right. " : `Your guess was ${digits(100 * Math.abs(off), 2)}% too ${off > 0 ? "high" : "low"}. `;
    known = Math.max(known, last + 1);
    page.again();
  };
  page.form.append(reveal);
};
