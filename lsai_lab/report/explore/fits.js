import { COLORS, between, count, digits, every, explorable, gib, grid, legend, make, sum, tokensAt } from "./draw.js";

const total = (of) => sum(Object.values(of));
const keys = (of) => of.d_model / of.n_heads * of.n_kv_heads;
const counted = (of) => 2 * of.vocab_size * of.d_model + of.d_model  // parameters
  + of.n_layers * (2 * of.d_model * (of.d_model + keys(of) + 1) + 3 * of.d_model * of.d_ff);
const flops = (of, length) => 6 * (of.parameters - (of.tied ? 0 : of.vocab_size * of.d_model))
  + 6 * of.n_layers * of.d_model * length;

// How much larger each part of one model's memory is than of another's.
const ratios = (own, known, checkpoint) => {
  const by = (size) => size(own) / size(known), all = by((of) => of.parameters);
  return { weights: all, gradients: all, optimizer: all, activations: by((of) => of.n_layers * (
    checkpoint === "full" ? of.d_model : 12.2 * of.d_model + 4 * of.d_ff + 4 * keys(of))),  // inputs of a block
  loss: by((of) => of.vocab_size * (of.d_model + 8500)), "kernel scratch": by((of) => of.d_model),
  "FSDP buffers": by((of) => of.vocab_size * of.d_model + (of.parameters - 2 * of.vocab_size * of.d_model) / of.n_layers) };
};

// A model of your own at a length: every part at each moment of the step as much larger as `by` says.
const scaled = ({ moments, ...row }, by) => {
  const lines = moments ?? every(row.parts, (size) => [size]);
  const parts = Object.values(lines)[0].map((_, moment) => every(lines, (line, name) => line[moment] * (by[name] ?? 1)))
    .reduce((a, b) => total(b) > total(a) ? b : a), larger = total(parts) / total(row.parts);
  return { ...row, parts, needs: larger * row.needs, least: larger * row.least, host: by.weights * row.host };
};

export const draw = (el, data, ask) => {
  const { fields, lengths, models, reference, gpus, parts, shape: SHAPE } = data, longest = lengths.at(-1);
  if (!data.ways.length) return;
  const room = (rows, usable) => {  // the most tokens that fit
    const last = rows.findLastIndex(({ needs }) => needs <= usable), [a, b] = rows.slice(Math.max(0, last));
    if (last < 0 || !b) return last < 0 ? 0 : longest;
    const share = (usable - a.needs) / (b.needs - a.needs);
    return 1024 * Math.floor((a.tokens + share * (b.tokens - a.tokens)) / 1024);
  };
  const body = make("tbody"), heads = make("tr"), others = make("table", { className: "rows" });
  const table = make("table", { className: "rows" }, make("thead", {}, heads), body);
  const inside = make("p", { className: "legend" }), asks = make("button", { type: "button" }, "Predict this exactly");
  let question;

  const update = (now, page) => {
    const { memory, usable, fp8, timed } = gpus[now.gpu], own = !models[now.model] && every(SHAPE, (_, name) => now[name]);
    const faults = now.train > 0 ? {} : { train: "more than 0" };
    page.draw();
    page.list([], []);
    for (const name of Object.keys(SHAPE)) {
      page.fields[name].parentElement.hidden = !own;
      if (own && !(now[name] >= 1 && now[name] % 1 === 0)) faults[name] = "a whole number from 1";
    }
    if (own.d_model % (2 * own.n_heads)) faults.n_heads ??= "twice their number must divide the width";
    if (own.n_heads % own.n_kv_heads) faults.n_kv_heads ??= "their number must divide the heads";
    for (const [name, words] of Object.entries(faults)) page.note(name, words);
    for (const name in faults) return page.say(`No prediction. Change “${fields[name].label}”: ${faults[name]}.`);
    if (own) own.parameters = counted(own);
    const length = Math.min(longest, tokensAt(now.tokens));
    const all = length * page.limit("batch", Math.floor(longest / length), `at most ${count(longest)} tokens a GPU`);
    const alike = data.ways.filter((way) => way.model === (own ? reference : now.model) && way.states === now.states);
    if (!alike.length) return page.say("This was not predicted.");
    const plain = page.off("products", !fp8 || !alike.some((way) => way.products === "fp8"), "bf16",
      fp8 ? "fp8 was predicted only for up to 8 B parameters with bf16 states; lsai plan has more" : `the ${now.gpu} has no fp8`);
    const products = plain ? "bf16" : now.products, least = Math.min(...alike.map((way) => way.gpus));
    for (const option of page.fields.gpus.options) option.disabled = Number(option.value) < least;
    const most = Math.max(least, Number(now.gpus)), size = 4 * models[now.model]?.parameters / 2 ** 30;
    if (least > 1) page.note("gpus", `at least ${least}: weights and gradients alone take ${gib(size)} GiB`);
    const ways = alike.map((way) => {
      const by = own && ratios(own, models[reference], way.checkpoint);
      const rows = own ? way.rows.map((row) => scaled(row, by)) : way.rows;
      return { ...way, rows, here: between(rows, all) };
    });
    const work = own ? flops(own, length) / flops(models[reference], length) : 1;
    const hours = (row) => now.train * 1e9 / row.all / 3600;
    const long = (row) => {
      const [of, unit] = [[24, "days"], [1, "hours"]].find(([of]) => hours(row) >= 2 * of) ?? [1 / 60, "minutes"];
      return row.all > 0 ? `${digits(hours(row) / of)} ${unit}` : "–";
    };
    const tried = (gpu, limit, kind = products) => ways.filter((way) => way.products === kind && way.gpus <= limit
      && (kind === "bf16" || gpus[gpu].fp8)).map((way) => {
        const { usable, most } = gpus[gpu], n = way.gpus, { needs, least, host, parts: causes } = way.here;
        const rank = needs <= usable ? 0 : least <= most ? 1 : 2, size = rank === 1 ? least : needs;
        const [floor, fixed, slope, bend] = way.time[gpu] ?? [];  // seconds of a step
        const seconds = Math.max(floor * Math.min(1, all / lengths[0]), Math.max(0, fixed) + all * (slope + bend * length));
        const speed = all / work / seconds, name = way.name + (n > 1 ? `, FSDP over ${n} GPUs` : "");
        return { way, name, n, rank, size, speed, all: speed * n, host, room: room(way.rows, usable),
          causes: { ...causes, "unused reserve": Math.max(0, size - total(causes)) } };
      });
    const order = (wanted) => (a, b) => {
      const places = (row) => [row.rank, ...row.rank > 1 ? [row.size] : [wanted === "fewest" ? row.n : 0,
        Math.sign(row.host), -(wanted === "shortest" ? row.all : row.speed) || 0]];
      return places(a).map((place, at) => place - places(b)[at]).find(Boolean) ?? 0;
    };
    const rows = tried(now.gpu, most).sort(order(now.order)), [best] = rows;
    const [fp8s] = tried(now.gpu, most, "fp8").sort(order(now.order));
    const some = (n, gpu) => `${n === 1 ? "one" : n} ${gpu}${n > 1 ? "s" : ""}`;
    const here = `${best.n > 1 ? "each of " : ""}${some(best.n, now.gpu)}`, sequences = Math.floor(best.room / length);
    const found = { fewest: best.n === 1 ? `One ${now.gpu} is enough: ` : `The fewest ${now.gpu}s that fit are ${best.n}: `,
      cheapest: "The least GPU time of those that fit takes ", shortest: "The fastest that fits is " }[now.order];
    const told = [found, "Nothing fits for sure. The nearest that is tight is ", `${count(all)} tokens a GPU do not fit on `
      + `${most > 1 ? "up to " : ""}${some(most, now.gpu)}. The nearest is `][best.rank];
    const words = [best.rank < 2 ? `, ${gib(best.size)} of ${gib(memory)} GiB on ${here}.`
      : `, which needs ${gib(best.size)} GiB on ${here}; a run may use ${gib(usable)} of ${gib(memory)} GiB.`];
    if (best.host > 1) words.push(`It needs ${gib(best.host)} GiB of the host's memory, too: check that yours has it.`);
    if (best.rank < 2 && best.all > 0) {
      words.push(`It trains at ${count(best.all)} tokens/s${best.n > 1 ? `, ${count(best.speed)} a GPU` : ""}.`,
        `${digits(now.train)} billion tokens take ${long(best)}`
        + `${best.n > 1 ? `, or ${digits(hours(best) * best.n)} GPU-hours` : ""}.`);
      const faster = now.order === "fewest" && rows.find((row) => !row.rank && row.speed > 2 * best.speed);
      if (faster) words.push(`Less GPU time: ${faster.name} on ${some(faster.n, now.gpu)}, in ${long(faster)}.`);
      if (!timed) words.push("The speed is estimated from the data sheet.");
      else if (best.n > 1) words.push(`The speed of several GPUs is estimated: as one among ${best.way.among}, with messages.`);
    } else if (best.n > data.node) words.push(`Its speed over more than one node of ${data.node} was not measured.`);
    const fitting = ({ room }) => `${room === longest ? "≥ " : ""}${count(room)}`;
    if (best.room > all) words.push(`There is room for ${best.room === longest ? "at least " : ""}${count(best.room)} tokens`
      + ` a GPU${sequences > 1 ? `, ${count(sequences)} sequences of ${count(length)}` : ""}.`);
    if (fp8s?.rank === 0 && (best.rank || fp8s.speed > best.speed)) words.push(`With fp8 matmuls: ${fp8s.name}, `
      + `${gib(fp8s.size)} GiB, ${count(fp8s.all)} tokens/s.`);
    page.say(told, make("b", {}, best.name), words.join(" "));
    const shown = (row) => parts.filter((name) => row.causes[name] >= 0.05);
    const explain = (row) => inside.replaceChildren(make("b", {}, row.name, ": "), ...legend(shown(row)
      .map((name) => [`${name} ${gib(row.causes[name])}`, COLORS[name]])).childNodes);
    const labels = ["verdict", "GiB needed", "tokens/s in all", "tokens/s a GPU", `${digits(now.train)} B tokens`,
      "room for tokens"];
    heads.replaceChildren(...["technique", `memory (line: ${gib(memory)} GiB)`, ...labels].map((head) =>
      make("th", { scope: "col" }, head)));
    body.replaceChildren(...rows.map((row) => {
      let end = 0;  // of a part, in percent: the bar is as wide as one and a half GPUs
      const percent = (size) => Math.min(100, end += size / memory / 0.015);
      const bands = shown(row).map((name) => `${COLORS[name]} 0 ${percent(row.causes[name])}%`);
      const bar = make("div", { className: "bar", role: "img", ariaLabel: shown(row).map((name) =>
        `${name} ${gib(row.causes[name])} GiB`).join(", "), style: `background: linear-gradient(90deg, ${bands}, #0000 0)` });
      if (row.size > 1.5 * memory) bar.append(make("span", {}, `${gib(row.size)} →`));
      const verdict = ["fits", "tight", "does not fit"][row.rank];
      const cells = [verdict, gib(row.size), count(row.all), count(row.speed), long(row), fitting(row)].map((cell, place) => {
        const node = make("td", place ? {} : { className: ["fits", "tight", "large"][row.rank] }, cell === "NaN" ? "–" : cell);
        node.dataset.label = labels[place];
        return node;
      });
      const host = row.host > 1 ? [make("small", {}, `and ${gib(row.host)} GiB of the host`)] : [];
      return make("tr", { tabIndex: 0, onpointerenter: () => explain(row), onfocus: () => explain(row) },
        make("th", { scope: "row" }, row.name, ...host), make("td", {}, bar), ...cells);
    }));
    explain(best);
    const fewest = Object.entries(gpus).map(([gpu, { memory, timed, fp8 }]) => {
      const [first] = tried(gpu, 64).filter((row) => !row.rank).sort(order("fewest"));
      return [gpu, gib(memory), ...first ? [first.n, first.name, gib(first.size),
        first.all ? `${timed ? "" : "≈ "}${count(first.all)}` : null]
        : ["none", fp8 || products === "bf16" ? "nothing up to 64 GPUs" : "no fp8 matmuls", null, null]];
    });
    others.replaceChildren(make("caption", {}, "The fewest GPUs of each kind that fit (≈: speed by the data sheet)"),
      ...grid(["GPU", "GiB", "GPUs", "technique", "GiB needed", "tokens/s, all"], fewest));
    const { checkpoint, offload, fused } = best.way, { parameters, ...shape } = own || {};
    question = { model: own ? shape : now.model, states: now.states, products, checkpoint, offload, fused,
      gpus: best.n, tokens: all };
    page.list(["cause", "GiB"], shown(best).map((name) => [name, digits(best.causes[name], 4)]));
    page.draw(table, inside, others);
  };
  const page = explorable(el, data, update);
  const own = el.dataset.address !== undefined;  // its own page, in whose address the choice stands
  const asked = new URLSearchParams(own ? location.hash.slice(1) : "");
  for (const [name, field] of Object.entries(page.fields)) {
    const usual = field.value;
    field.value = asked.get(name) ?? usual;
    if (!field.value || !field.checkValidity()) field.value = usual;
    if (field.value !== usual && field.closest("details")) field.closest("details").open = true;
    page.again();  // a slider's end follows those before it
  }
  if (own) page.form.addEventListener("input", () =>
    location.replace(`#${new URLSearchParams(every(page.fields, (field) => field.value))}`));
  if (!ask) return;
  page.form.append(asks);
  asks.onclick = async () => {
    page.say("Predicting, some seconds ...");
    const found = await ask(question);
    page.say(found.error ?? `lsai predict: the peak is ${gib(total(found.parts))} GiB, and the allocator needs `
      + `${gib(found.needs)} GiB.`);
  };
};
