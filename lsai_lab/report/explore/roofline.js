import { PALETTE, amount, chart, count, digits, explorable, legend } from "./draw.js";

const microseconds = (time) => time < 1e3 ? `${digits(time)} µs` : `${digits(time / 1e3)} ms`;

export const draw = (el, data) => {
  const { operations, gpus, measured } = data;
  const page = explorable(el, data, (now, page) => {
    const { operation, gpu } = now, alone = operations[operation], known = gpus[gpu];
    const plain16 = page.off("format", !alone.bytes.fp8 || !known.fp8, "bf16",
      known.fp8 ? "fp8 is for matmuls" : `the ${gpu} has no fp8`);
    const fused = !page.off("fused", !alone.fused, false, "nothing to fuse with here") && now.fused && alone.fused;
    page.off("tokens", !alone.flop[1], now.tokens, "the update takes the same time for any number");
    const format = plain16 ? "bf16" : now.format;
    const roof = (intensity, way) => Math.min(known[way], intensity * known.copy / 1e3);
    const cost = ({ flop, bytes }, tokens) => {
      const at = ([base, each]) => base + each * tokens, work = at(flop), moved = at(bytes[format]);
      const arithmetic = work / known[format] / 1e6, memory = moved / known.copy / 1e3;  // µs
      return { work, moved, intensity: work / moved, arithmetic, memory, least: Math.max(arithmetic, memory) };
    };
    if (alone.whole) page.note("tokens", `whole sequences of ${count(alone.whole)}: each query reads all keys before it`);
    if (alone.whole) page.set("tokens", now.tokens = Math.max(Math.log2(alone.whole), Math.round(now.tokens)));
    const tokens = Math.round(2 ** now.tokens), chosen = fused || alone, here = cost(chosen, tokens);
    const limit = here.arithmetic > here.memory ? "arithmetic" : "memory", plain = cost(alone, tokens);
    const apart = fused && cost({ flop: alone.flop, bytes: alone.apart }, tokens).moved;
    page.say(`${operation}${fused ? ` with ${alone.with}` : ""}: ${amount(here.work, "FLOP")} and ${amount(here.moved, "B")}, `
      + `${digits(here.intensity)} FLOP/byte. On an ${gpu}${known.sheet ? " (by its data sheet)" : ""}`
      + ` it takes at least ${microseconds(here.least)}; ${limit} decides.`
      + `${here.least < data.start ? ` To start a kernel takes longer, about ${digits(data.start, 1)} µs.` : ""}`
      + `${fused ? ` Apart, ${amount(apart, "B")} would move: fusing saves ${amount(apart - here.moved, "B")}.` : ""}`);
    const range = [0.1, 20000], top = Math.max(known.fp8 ?? 0, known.bf16);
    const plot = chart(page.width, Math.min(360, page.width * 0.7 + 60), { x: range, y: [0.2, top * 2],
      log: "xy", xlabel: "FLOPs per byte", ylabel: "TFLOP/s", label: `Roof of ${gpu}: ${operation} at `
        + `${digits(here.intensity)} FLOPs per byte may reach ${digits(roof(here.intensity, format))} TFLOP/s` });
    const outline = (way) => [range[0], known[way] / known.copy * 1e3, range[1]].map((x) => [x, roof(x, way)]);
    if (known.fp8) plot.line(outline("fp8"), PALETTE[5], { "stroke-dasharray": "6 4" });
    plot.line(outline("bf16"), PALETTE[0]);
    for (const point of measured.filter((point) => point.gpu === gpu)) {
      plot.dot(point.intensity, point.tflops, "none", { r: 4, stroke: PALETTE[point.way === "fp8" ? 5 : 0],
        "stroke-width": 1.5 });
    }
    if (fused) plot.dot(plain.intensity, roof(plain.intensity, format), "none", { r: 7, stroke: PALETTE[1] });
    plot.dot(here.intensity, roof(here.intensity, format), PALETTE[1], { r: 8, class: "here" });
    const slide = ({ clientX, buttons }) => {  // to the tokens whose intensity is nearest
      if (!buttons || page.fields.tokens.disabled) return;
      const box = plot.node.getBoundingClientRect(), x = (clientX - box.left) * page.width / box.width;
      const far = (power) => Math.abs(x - plot.X(cost(chosen, 2 ** power).intensity));
      const powers = [now.tokens, ...Array.from({ length: 61 }, (_, at) => at / 4)];
      page.set("tokens", powers.reduce((a, b) => far(b) < far(a) ? b : a));
      page.again();
    };
    page.picture.onpointerdown = page.picture.onpointermove = slide;
    page.draw(legend([["bf16", PALETTE[0]], ["fp8", PALETTE[5]], ["the operation", PALETTE[1]]]), plot.node);
    page.list(["quantity", "value"], [["FLOPs", count(here.work)], ["bytes", count(here.moved)],
      ["FLOPs per byte", digits(here.intensity, 4)], ["by arithmetic (µs)", digits(here.arithmetic, 4)],
      ["by memory (µs)", digits(here.memory, 4)], ["at least (µs)", digits(here.least, 4)],
      ["balance (FLOPs per byte)", digits(known[format] / known.copy * 1e3, 4)]]);
  });
  page.picture.style.cursor = "ew-resize";
};
