import { PALETTE, chart, digits, explorable } from "./draw.js";

// To nearest, ties to the even mantissa, beyond the largest to that; `all`: the format's numbers from 0.
const stored = (all, value) => {
  const closer = (at, best) => Math.abs(all[best] - value) - Math.abs(all[at] - value) || best % 2;
  return all[all.reduce((best, _, at) => closer(at, best) > 0 ? at : best, 0)];
};

export const draw = (el, data) => {
  explorable(el, data, (now, page) => {
    const format = data.formats[now.format], top = format.at(-1), largest = Number(digits(2 ** now.largest, 2));
    const power = page.limit("value", now.largest, "at most the largest value");
    const value = Math.min(largest, Number(digits(2 ** power, 2))), scale = now.scaled ? top / largest : 1;
    const there = Math.fround(value * scale), kept = stored(format, there), back = kept / scale;
    const error = `${digits(100 * Math.abs(back / value - 1), 2)}%`;
    page.say(`${now.scaled ? `${value} times the scale ${top} / ${largest} = ${digits(scale, 4)} is ${digits(there, 4)}. ` : ""}`
      + `${now.format} ${there > top ? "clips" : "stores"} ${digits(there, 4)} ${there > top ? "to" : "as"} ${digits(kept, 4)}`
      + `${now.scaled && kept ? `, which means ${digits(back, 4)}` : ""}: ${kept ? `${error} off` : "the value is lost"}.`);
    const line = chart(page.width, 150, { x: [2 ** -17, 2 ** 17], y: [0, 1], log: "x", yticks: [],
      xlabel: `numbers that ${now.format} has, and the value (scaled)`,
      label: `Number line of ${now.format}: the value lies at ${digits(there, 4)}, the nearest number is ${kept}` });
    const marks = format.slice(1).map((known) => `M${line.X(known)} ${line.Y(0.05)}V${line.Y(0.4)}`);
    line.add("path", { d: marks.join(""), stroke: PALETTE[0], "stroke-width": 1 });
    const at = (number, up, words, color) => {
      const x = line.X(Math.min(2 ** 16.5, Math.max(2 ** -16.8, number)));
      line.add("line", { x1: x, x2: x, y1: line.Y(0), y2: line.Y(up), stroke: color, "stroke-width": 2 });
      line.text(x, line.Y(up) - 4, words, { "text-anchor": "middle" });
    };
    at(largest * scale, 0.85, "largest", "currentColor");
    at(there, 0.6, "value", PALETTE[1]);
    page.draw(line.node);
    page.list(["quantity", "value"], [["value", value], ["scale", scale], ["scaled", there], ["stored", kept],
      ["read back", back], ["error", error]]);
  });
};
