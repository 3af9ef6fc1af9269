import { PALETTE, canvas, chart, count, digits, explorable, make } from "./draw.js";

// The causal triangle of each group of heads: who computes a pair of chunks, and in which step.
const triangles = ({ groups, cells, work }, gpus, step, width) => {
  const chunks = 2 * work[0].length, side = Math.min(230, width / Math.min(groups, 4) - 14);
  const rows = Math.ceil(groups / 4), cell = side / chunks;
  const { node, add, text } = canvas(Math.min(groups, 4) * (side + 14), rows * (side + 24),
    `Queries by keys, colored by GPU; ${groups} group${groups > 1 ? "s" : ""} of heads`);
  for (let group = 0; group < groups; group += 1) {
    const left = (group % 4) * (side + 14), top = Math.floor(group / 4) * (side + 24) + 16;
    text(left, top - 4, groups > 1 ? `heads, part ${group + 1}` : "keys →");
    for (const [query, key, worker, at] of cells) {
      const facts = { fill: PALETTE[worker * groups + group], opacity: at < step ? 0.45 : at > step ? 0.12 : 1 };
      const x = left + key * cell, y = top + query * cell, edge = cell + 0.3;
      // half of a cell on the diagonal: a query has no later keys
      add("path", { ...facts, d: `M${x} ${y}v${edge}h${edge}${query === key ? "" : `v${-edge}`}z` });
    }
  }
  return node;
};

// What each GPU computes in this step, and how long it waits for the slowest.
const bars = ({ groups, work, sent }, gpus, step, width) => {
  const most = Math.max(...work.flat()), row = 24, left = 56, right = 118;
  const { node, add, text } = canvas(width, gpus * row + 20, `Work and messages of each GPU in step ${step + 1}`);
  const scale = (width - left - right) / most, slowest = Math.max(...work[step]);
  text(left, 12, "computes (gray: waits)");
  text(width - right + 8, 12, "sends");
  for (let gpu = 0; gpu < gpus; gpu += 1) {
    const rank = Math.floor(gpu / groups), share = work[step][rank], y = 18 + gpu * row;
    text(0, y + 15, `GPU ${gpu + 1}`);
    const bar = (from, length, fill) => add("rect", { x: left + from * scale, y: y + 2,
      width: Math.max(0, length * scale), height: row - 6, fill });
    bar(0, share, PALETTE[gpu]);
    bar(share, slowest - share, "#8886");
    const last = step === work.length - 1 ? sent.at(-1)[rank] : 0;
    text(width - right + 8, y + 15, `${digits(sent[step + 1][rank] + (step ? 0 : sent[0][rank]) + last)} MiB`);
  }
  return node;
};

const speeds = (measured, methods, now, width) => {
  const of = Math.max(...measured.map(({ gpus }) => gpus).filter((gpus) => gpus <= now.gpus));
  const known = measured.filter(({ gpus }) => gpus === of), more = of < now.gpus ? ` (${now.gpus} were not)` : "";
  const lengths = [...new Set(known.map(({ length }) => length))].sort((a, b) => a - b);
  const plot = chart(width, 240, { x: [Math.min(...lengths), Math.max(...lengths)],
    y: [0, 1.1 * Math.max(...known.map(({ tflops }) => tflops))], log: "x", xlabel: "tokens of the sequence",
    right: 96, ylabel: `TFLOP/s of one of ${of} ${known[0].gpu}s, measured${more}`,
    xticks: lengths.filter((_, at) => width > 560 || at % 2 === 0).map((length) => [length, `${length / 1024}K`]),
    label: `Measured speed over the length: ${methods[now.method]} and the other methods` });
  const ends = [];
  for (const method of [...Object.keys(methods).filter((name) => name !== now.method), "one", now.method]) {
    const points = known.filter((row) => row.method === method).map((row) => [row.length, row.tflops]);
    const look = method === now.method ? { "stroke-width": 3.5 } : { opacity: 0.5, "stroke-width": 1.5 };
    if (!points.length) continue;
    plot.line(points, "currentColor", { ...look, ...method === "one" && { "stroke-dasharray": "5 4" } });
    if (method === "one") plot.text(plot.X(points[0][0]), plot.Y(points[0][1]) - 9, "one GPU alone");
    else ends.push([methods[method], ...points.at(-1), method === now.method ? { "font-weight": 700 } : {}]);
  }
  plot.ends(ends);
  return plot.node;
};

export const draw = (el, data) => {
  const { plans, methods, measured, length } = data, play = make("button", { type: "button" }, "Play");
  const page = explorable(el, data, (now, page) => {
    const plan = plans[now.method][now.gpus], gpus = Number(now.gpus), { work, sent, groups } = plan, ring = work[0].length;
    const step = page.limit("step", work.length, `${work.length} step${work.length > 1 ? "s" : ""} in all`) - 1;
    if (!measured.some((row) => row.gpus === gpus)) page.note("gpus", "computed from the plan; speeds were measured on fewer");
    play.disabled = work.length === 1;
    const waiting = work[step].filter((share) => share < Math.max(...work[step]) - 1e-4).length * groups;
    const trained = measured.find((row) => row.method === now.method && row.gpus === gpus && row.length === length);
    const idle = waiting ? `${waiting} of ${gpus} GPUs wait${waiting > 1 ? "" : "s"}` : "no GPU waits";
    page.say(`Step ${step + 1} of ${work.length}: ${idle}. `
      + `Over all steps the GPUs compute ${digits(100 * plan.efficiency)}% of the time if each step waits for `
      + `its slowest. Over ${count(length)} tokens a GPU sends up to ${count(plan.most_sent)} MiB in the forward pass`
      + `${trained ? `, and ${count(trained.sent)} MiB with the backward pass, as measured` : ""}.`);
    const half = page.width < 640 ? page.width : page.width / 2 - 8;
    page.draw(make("div", { className: "beside" }, triangles(plan, gpus, step, half),
      bars(plan, gpus, step, half)), speeds(measured, methods, now, page.width));
    page.list(["step", ...Array.from({ length: ring }, (_, rank) => `GPU ${rank + 1}: work (%), sent (MiB)`)],
      work.map((shares, at) => [at + 1, ...shares.map((share, rank) =>
        `${digits(100 * share)}, ${digits(sent[at + 1][rank])}`)]));
  });
  const { step } = page.fields;
  let clock;
  const move = () => {
    step.value = step.value % step.max + 1;
    page.again();
  };
  play.onclick = () => {
    clearInterval(clock);
    clock = clock ? undefined : setInterval(move, 1000);
    play.textContent = clock ? "Stop" : "Play";
  };
  page.form.append(play);
};
