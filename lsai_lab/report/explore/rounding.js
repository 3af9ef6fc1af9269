import { COLORS, chart, digits, explorable, legend, make, sum } from "./draw.js";

// fp32 to bf16: its 16 highest bits, after a carry that rounds to nearest or by `bits`.
const view = new DataView(new ArrayBuffer(4));
const bfloat = (value, bits) => {
  view.setFloat32(0, value);
  const whole = view.getUint32(0);
  view.setUint32(0, (whole + (bits ?? 0x7fff + ((whole >>> 16) & 1))) & 0xffff0000);
  return view.getFloat32(0);
};

const trained = (start, update, steps, bits) => {
  const f = Math.fround, exact = [start], nearest = [bfloat(start)];
  const random = Array.from({ length: 8 }, () => [bfloat(start)]);
  for (let step = 1; step <= steps; step += 1) {
    exact.push(start + step * update);
    nearest.push(bfloat(f(nearest.at(-1) + f(update))));
    random.forEach((line, at) => line.push(bfloat(f(line.at(-1) + f(update)), bits[step - 1][at])));
  }
  return { exact, nearest, random };
};

export const draw = (el, data) => {
  let bits = data.bits;  // as the package draws them, until the reader wants others
  const page = explorable(el, data, (now, page) => {
    const start = Number(now.weight), update = Number(digits(2 ** now.update, 2));
    const { exact, nearest, random } = trained(start, update, now.steps, bits);
    const gap = bfloat(bfloat(start), 0x10000) - bfloat(start);  // to the next larger number
    const end = (line) => line[now.steps], mean = sum(random.map(end)) / 8;
    const stuck = end(nearest) === nearest[0];
    page.note("update", `gap to the next number: ${digits(gap)}`);
    page.say(`To nearest the weight ${stuck ? "never moves" : "moves"}: the update, ${digits(update, 2)}, is `
      + `${digits(update / gap, 2)} times the distance to the next larger bf16 number, ${digits(gap)}. Rounded `
      + `stochastically, eight weights end between ${digits(Math.min(...random.map(end)), 4)} and `
      + `${digits(Math.max(...random.map(end)), 4)}, at ${digits(mean, 4)} in the mean; exact is ${digits(end(exact), 4)}.`);
    const ends = [start, end(exact), end(nearest), ...random.flat()];
    const [low, high] = [Math.min(...ends) - gap, Math.max(...ends) + gap];
    const lines = chart(page.width, 260, { x: [0, now.steps], y: [low, high], xlabel: "step",
      ylabel: "weight", label: `The weight over ${now.steps} steps: exact ends at ${digits(end(exact), 4)}, `
        + `to nearest at ${digits(end(nearest), 4)}, stochastically at ${digits(mean, 4)}` });
    const points = (line) => line.map((value, step) => [step, value]);
    for (const line of random) lines.line(points(line), COLORS.good, { "stroke-width": 1 });
    for (const line of random) lines.dot(now.steps, end(line), COLORS.good, { r: 3.5 });
    lines.line(points(exact.map((_, step) => sum(random.map((line) => line[step])) / 8)), COLORS.good, { "stroke-width": 4,
      opacity: 0.5 });
    lines.line(points(exact), "currentColor", { "stroke-dasharray": "5 4", "stroke-width": 1.5 });
    lines.line(points(nearest), COLORS.bad, { "stroke-width": 2.5 });
    page.draw(legend([["exact (dashed)", "currentColor"], ["to nearest", COLORS.bad],
      ["stochastically: eight weights (thin) and their mean", COLORS.good]]), lines.node);
    page.list(["way", `after ${now.steps} steps`], [["exact", end(exact)], ["to nearest", end(nearest)],
      ...random.map((line, at) => [`stochastically, weight ${at + 1}`, end(line)])]);
  });
  const onclick = () => {
    bits = bits.map((step) => step.map(() => Math.floor(2 ** 16 * Math.random())));
    page.again();
  };
  page.form.append(make("button", { type: "button", onclick }, "Again, with other random bits"));
};
