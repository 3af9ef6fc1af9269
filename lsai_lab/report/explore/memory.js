import { COLORS, between, chart, count, digits, every, explorable, gib, legend, mixed, sum, tokensAt } from "./draw.js";

export const draw = (el, data, ask) => {
  const { gpus, parts, slices, lengths } = data;
  const total = sum(Object.values(slices)), answers = new Map();  // what Python predicted, by question
  const full = (line) => line.length ? line : Array(total).fill(line);  // a cause may be one number
  const whole = (row) => ({ ...row, timeline: every(row.timeline, full) });
  const rows = data.rows.map(whole).sort((a, b) => a.tokens - b.tokens), last = lengths.at(-1);
  let waiting;
  const lookup = (asked) => {
    const kept = answers.get(JSON.stringify(asked));
    if (kept) return [kept, "predicted"];
    const alike = (row) => ["model", "states", "checkpoint", "fused"].every((name) => row[name] === asked[name]);
    const line = (gpus) => between(rows.filter((row) => alike(row) && row.gpus === gpus), asked.tokens);
    const share = (1 / 4 - 1 / asked.gpus) / (1 / 4 - 1 / 64);  // of a shared model a GPU keeps 1 / GPUs
    const found = asked.gpus === 1 ? line(1) : mixed(line(4), line(64), share);
    return [found, lengths.includes(asked.tokens) && [1, 4, 64].includes(asked.gpus) ? "predicted" : "between predictions"];
  };
  explorable(el, data, (now, page) => {
    const length = tokensAt(now.tokens);
    const batch = page.limit("batch", Math.floor(last / length), `at most ${count(last)} tokens a GPU`);
    const plain = now.gpus === "1" && now.checkpoint === "none";
    const fused = page.off("fused", !plain, true, "always on, except on one GPU without checkpointing") || now.fused;
    const asked = { model: now.model, states: now.states, checkpoint: now.checkpoint, gpus: Number(now.gpus),
      fused, tokens: length * batch };
    const [found, how] = lookup(asked), { memory, usable, most } = gpus[now.gpu], times = Object.values(found.timeline);
    if (ask && how !== "predicted") {
      clearTimeout(waiting);
      waiting = setTimeout(() => ask(asked).then((answer) => {
        if (answer.error) return page.say(answer.error);
        answers.set(JSON.stringify(asked), whole(answer));
        page.again();
      }), 400);
    }
    const causes = parts.filter((name) => found.timeline[name]?.some((size) => size > 0.4));
    const levels = times[0].map((_, at) => sum(times.map((line) => line[at])) / 10);
    const peak = sum(Object.values(found.parts)), top = levels.indexOf(Math.max(...levels));
    const bounds = Object.values(slices).reduce((ends, part) => [...ends, ends.at(-1) + part], [0]);
    const phase = Object.keys(slices)[bounds.findIndex((end, at) => top < bounds[at + 1])];
    const words = { forward: "forward pass", backward: "backward pass", optimizer: "update" };
    const each = now.gpus === "1" ? `one ${now.gpu}` : `each of ${now.gpus} ${now.gpu}s`;
    const [needs, free] = [found.needs, most].map((size) => gib(size, 1)), apart = gib(Math.abs(needs - free), 1);
    const verdict = found.needs <= usable ? `It fits on ${each} with ${apart} GiB to spare.` : found.least <= most
      ? `It is tight on ${each}${found.needs > most ? ", and slow, because unused memory must be given back" : ""}: try it.`
      : `It does not fit on ${each}: ${apart} GiB are missing.`;
    const where = top === bounds[1] - 1 || top === bounds[1] ? "at the loss" : `in the ${words[phase]}`;
    page.say(`${verdict} The peak is ${gib(peak)} GiB ${where}, and the allocator needs ${needs} GiB; `
      + `a run may use ${free} of ${gib(memory)} GiB (${how}).`);
    const high = 1.12 * Math.max(memory, ...levels);
    const plot = chart(page.width, Math.min(340, 0.62 * page.width + 60), { x: [0, total - 1], y: [0, high],
      ylabel: "GiB", xticks: Object.keys(slices).map((name, at) => [(bounds[at] + bounds[at + 1] - 1) / 2,
        page.width > 500 ? words[name] : words[name].split(" ")[0]]), label: `Memory over a step: the peak is ${gib(peak)} GiB `
        + `${where}; the GPU has ${gib(memory)} GiB` });
    const height = levels.map(() => 0), fold = (heights) => heights.map((size, at) => [at, size]);
    for (const name of causes) {
      const lower = [...height];
      found.timeline[name].forEach((size, at) => height[at] += size / 10);
      plot.area(fold(height), fold(lower), COLORS[name]);
    }
    for (const end of bounds.slice(1, -1)) plot.line([[end - 0.5, 0], [end - 0.5, high]], "#8888",
      { "stroke-width": 1, "stroke-dasharray": "2 3" });
    plot.line([[0, memory], [total - 1, memory]], "currentColor", { "stroke-dasharray": "7 4" });
    plot.text(plot.X(total - 1), plot.Y(memory) - 5, `${now.gpu}: ${gib(memory)} GiB`, { "text-anchor": "end" });
    plot.dot(top, levels[top], "currentColor", { r: 4 });
    page.draw(legend(causes.map((name) => [name, COLORS[name]])), plot.node);
    page.list(["at the peak", "GiB"], [...parts.filter((name) => found.parts[name] >= 0.005).map((name) =>
      [name, digits(found.parts[name], 4)]), ["sum", digits(peak, 4)], ["needs", digits(found.needs, 4)]]);
  });
};
