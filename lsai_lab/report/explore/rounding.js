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
    exact.push(start - step * update);
    nearest.push(bfloat(f(nearest.at(-1) - f(update))));
    random.forEach((line, at) => line.push(bfloat(f(line.at(-1) - f(update)), bits[step - 1][at])));
  }
  return { exact, nearest, random };
};

// To nearest, ties to the even mantissa, beyond the largest to that; `all`: the format's numbers from 0.
const stored = (all, value) => {
  const above = all.findIndex((known) => known >= value);
  if (above < 1) return above < 0 ? all.at(-1) : all[0];
  const [a, b] = [all[above - 1], all[above]], part = (value - a) / (b - a);
  return part < 0.5 || (part === 0.5 && (above - 1) % 2 === 0) ? a : b;
};

export const draw = (el, data) => {
  const weights = make("div"), numbers = make("div");
  el.replaceChildren(weights, numbers);
  explorable(weights, "A weight in bf16.", "Every step subtracts the same update. Does it arrive?", {
    weight: { label: "weight", choices: data.weights, value: 1 },
    update: { label: "update of a step", range: [-16, -4, 0.25], value: -10,
      show: (power) => digits(2 ** power, 2) },
    steps: { label: "steps", range: [20, data.bits.length, 20], value: 100 },
  }, (now, page) => {
    const start = Number(now.weight), update = Number(digits(2 ** now.update, 2));
    const { exact, nearest, random } = trained(start, update, now.steps, data.bits);
    const gap = bfloat(start) - bfloat(bfloat(start) * (1 - 2 ** -8), 0);  // to the next smaller number
    const end = (line) => line[now.steps], mean = sum(random.map(end)) / 8;
    const stuck = end(nearest) === nearest[0];
    page.say(`To nearest the weight ${stuck ? "never moves" : "moves"}: the update, ${digits(update, 2)}, is `
      + `${digits(update / gap, 2)} of the distance to the next smaller bf16 number, ${digits(gap)}. Rounded `
      + `stochastically, eight weights end at ${digits(mean, 4)} in the mean; exact is ${digits(end(exact), 4)}.`);
    const ends = [start, end(exact), end(nearest), ...random.flat()];
    const [low, high] = [Math.min(...ends) - gap, Math.max(...ends) + gap];
    const lines = chart(page.width, 260, { x: [0, now.steps], y: [low, high], xlabel: "step",
      ylabel: "weight", label: `The weight over ${now.steps} steps: exact ends at ${digits(end(exact), 4)}, `
        + `to nearest at ${digits(end(nearest), 4)}, stochastically at ${digits(mean, 4)}` });
    const points = (line) => line.map((value, step) => [step, value]);
    for (const line of random) lines.line(points(line), COLORS[2], { "stroke-width": 1, opacity: 0.45 });
    const means = exact.map((_, step) => sum(random.map((line) => line[step])) / 8);
    lines.line(points(means), COLORS[2]);
    lines.line(points(exact), "currentColor", { "stroke-dasharray": "5 4", "stroke-width": 1.5 });
    lines.line(points(nearest), COLORS[1], { "stroke-width": 2.5 });
    page.draw(legend([["exact (dashed)", "currentColor"], ["to nearest", COLORS[1]],
      ["stochastically: eight weights, mean", COLORS[2]]]), lines.node);
    page.list(["way", `after ${now.steps} steps`], [["exact", end(exact)], ["to nearest", end(nearest)],
      ...random.map((line, at) => [`stochastically, weight ${at + 1}`, end(line)])]);
  });
  explorable(numbers, "A number in fp8.", "A scale moves a tensor to where the format has numbers.", {
    format: { label: "format", choices: Object.keys(data.formats) },
    value: { label: "value", range: [-14, 6, 0.25], value: -3.25, show: (power) => digits(2 ** power, 2) },
    largest: { label: "largest value of the tensor", range: [-6, 8, 0.25], value: 1.25,
      show: (power) => digits(2 ** power, 2) },
    scaled: { label: "scale the tensor", value: true },
  }, (now, page) => {
    const format = data.formats[now.format], top = format.at(-1), value = Number(digits(2 ** now.value, 2));
    if (now.largest < now.value) page.set("largest", now.largest = now.value);
    const largest = Math.max(value, Number(digits(2 ** now.largest, 2)));
    const scale = now.scaled ? top / largest : 1;
    const there = Math.fround(value * scale), kept = stored(format, there), back = kept / scale;
    const error = `${digits(100 * Math.abs(back / value - 1))}%`;
    page.say(`${value} ${now.scaled ? `times the scale ${top} / ${largest} = ${digits(scale, 4)} ` : ""}`
      + `is ${digits(there, 4)}; ${now.format} keeps ${digits(kept, 6)}, `
      + `which means ${digits(back, 4)}: ${kept ? `${error} off` : "the value is lost"}.`);
    const line = chart(page.width, 150, { x: [2 ** -17, 2 ** 17], y: [0, 1], log: "x", yticks: [],
      xlabel: `numbers that ${now.format} has, and the value (scaled)`,
      label: `Number line of ${now.format}: the value lies at ${digits(there, 4)}, the nearest number is ${kept}` });
    for (const known of format.slice(1)) {
      line.add("line", { x1: line.X(known), x2: line.X(known), y1: line.Y(0.05), y2: line.Y(0.4),
        stroke: COLORS[0], "stroke-width": 1 });
    }
    const at = (number, up, words, color) => {
      const x = line.X(Math.min(2 ** 16.5, Math.max(2 ** -16.8, number)));
      line.add("line", { x1: x, x2: x, y1: line.Y(0), y2: line.Y(up), stroke: color, "stroke-width": 2 });
      line.text(x, line.Y(up) - 4, words, { "text-anchor": "middle" });
    };
    at(largest * scale, 0.85, "largest", "currentColor");
    at(there, 0.6, "value", COLORS[1]);
    page.draw(line.node);
    page.list(["quantity", "value"], [["value", value], ["scale", scale], ["scaled", there], ["stored", kept],
      ["read back", back], ["error", error]]);
  });
};
