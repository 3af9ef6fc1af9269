import { COLORS, canvas, count, digits, explorable, legend, make, sum, svg } from "./draw.js";

export const draw = (el, data) => {
  const { steps } = data;
  const classes = Object.keys(steps[0].classes), names = steps.map(({ name }) => name), slowest = steps[0].tokens_per_s;
  // `known`: steps that have been looked at, from the first on; `misses`: of the guesses, in percent
  let known = 1, round = 0, told = "", misses = [], guessed = 0;  // the step that was guessed at last
  const reveal = make("button", { type: "button" });
  data.fields.guess.show = (times) => `${count(times * slowest)}, ${times.toFixed(2)}x eager`;
  const page = explorable(el, data, (now, page) => {
    const last = names.indexOf(now.change), step = steps[last], hidden = last >= known, done = known === steps.length;
    [...page.fields.change.options].forEach((option, at) => option.disabled = at > known);
    reveal.textContent = done ? "Guess again from the start" : "Show what was measured";
    reveal.disabled = hidden ? guessed !== last : !done;
    page.fields.guess.disabled = !hidden;
    const before = steps[Math.max(0, last - 1)];
    if (hidden && round !== last) page.set("guess", before.tokens_per_s / slowest);
    if (hidden && guessed !== last) page.note("guess", "move it first");
    round = last;
    page.say(hidden ? `${told}${step.name}: ${step.about}. How many tokens/s will the step reach? Before the change it was `
      + `${count(before.tokens_per_s)}.` : `${told}${step.name}: ${digits(step.step_ms, 4)} ms a step, `
      + `${count(step.tokens_per_s)} tokens/s (${(step.tokens_per_s / slowest).toFixed(2)}x eager), `
      + `${count(step.clock_mhz)} MHz, ${count(step.watts)} W, ${digits(1e3 * step.joules_per_token)} mJ per token, `
      + `peak ${step.peak_gib.toFixed(1)} GiB. Loss on unseen text after ${step.steps} steps: ${step.loss.toFixed(2)} nats `
      + `(${step.losses.map((loss) => loss.toFixed(2)).join(", ")}).`);
    told = "";
    const shown = steps.slice(0, hidden ? last : last + 1), row = 40, right = 92, width = page.width;
    const scale = (width - right) / steps[0].step_ms;
    const { node, add, text } = canvas(width, (last + 1) * row + 6, `Milliseconds of ${shown.length} steps by class of kernel`);
    shown.forEach((each, at) => {
      let end = 0;
      text(0, at * row + 13, each.name);
      for (const name of classes.filter((name) => each.classes[name] > 0)) {
        const size = each.classes[name] * scale;
        add("rect", { x: end, y: at * row + 17, width: size, height: 19, fill: COLORS[name] },
          svg("title", {}, `${name}: ${digits(each.classes[name])} ms`));
        end += size;
      }
      text(end + 6, at * row + 31, `${digits(each.step_ms, 4)} ms`);
    });
    if (hidden) text(0, last * row + 26, `${step.name}: ?`);
    page.draw(legend(classes.map((name) => [name, COLORS[name]])), node);
    page.list(data.heads, shown.map(({ row }) => row));
  });
  page.fields.guess.addEventListener("input", () => guessed = round);  // before the form's own answer to it
  reveal.onclick = () => {
    if (known === steps.length) {
      [known, round, misses, guessed] = [1, 0, [], 0];
      page.set("change", names[1]);
      return page.again();
    }
    const off = page.fields.guess.value * slowest / steps[round].tokens_per_s - 1;
    misses.push(100 * Math.abs(off));
    told = `${Math.abs(off) < 0.02 ? "Right" : `Your guess was ${digits(misses.at(-1), 2)}% too ${off > 0 ? "high" : "low"}`}`
      + `${misses.length > 1 ? `; in the mean you were ${digits(sum(misses) / misses.length, 2)}% off. ` : ". "}`;
    known = round + 1;
    page.again();
  };
  page.form.append(reveal);
};
