import { COLORS, between, count, digits, explorable, gib, make, mixed, sum } from "./draw.js";

const GPU_COUNTS = [1, 2, 4, 8, 16, 32, 64], OWN = "a model of your own";
const SHAPE = { n_layers: "layers", d_model: "width", n_heads: "heads", n_kv_heads: "key-value heads",
  d_ff: "feed-forward width", vocab_size: "vocabulary" };
const total = (of) => sum(Object.values(of));

const counted = (shape) => {  // parameters, untied
  const { n_layers: layers, d_model: d, d_ff: f, vocab_size: words } = shape;
  return 2 * words * d + d + layers * (2 * d * d + 2 * d * wide(shape) + 3 * d * f + 2 * d);
};
const wide = ({ d_model: d, n_heads: heads, n_kv_heads: kept }) => d / heads * kept;
const flops = (shape, tokens) => 6 * (shape.parameters - (shape.tied ? 0 : shape.vocab_size * shape.d_model))
  + 6 * shape.n_layers * shape.d_model * tokens;

// How much larger each part of one model's memory is than of another's.
const ratios = (own, known, checkpoint) => {
  const inputs = (of) => of.n_layers * (checkpoint === "full" ? of.d_model
    : 12.2 * of.d_model + 4 * of.d_ff + 4 * wide(of));
  const loss = (of) => of.vocab_size * (of.d_model + 8500), buffers = (of) => of.vocab_size * of.d_model
    + (of.parameters - 2 * of.vocab_size * of.d_model) / of.n_layers;
  const by = (size) => size(own) / size(known), all = by((of) => of.parameters);
  return { weights: all, gradients: all, optimizer: all, host: all, activations: by(inputs), loss: by(loss),
    "FSDP buffers": by(buffers), "kernel scratch": by((of) => of.d_model) };
};

export const draw = (el, data, ask) => {
  if (!data.rows.length) return;
  const { models, reference, gpus, parts, states, checkpoints } = data;
  const lengths = [...new Set(data.rows.map((row) => row.tokens))].sort((a, b) => a - b);
  const [shortest, longest] = [lengths[0], lengths.at(-1)];
  const color = (name) => COLORS[parts.indexOf(name)] ?? (name === "libraries" ? "#777777" : "#c8ced6");
  const families = Map.groupBy(data.rows, ({ model, states, products, checkpoint, offload, fused, gpus }) =>
    [model, states, products, checkpoint, offload, fused, gpus].join());

  // A technique's memory over tokens and its time, of a model of the table.
  const line = (model, way, gpus) => {
    const rows = (n) => families.get([model, way.states, way.products, way.checkpoint, way.offload, way.fused,
      n].join()) ?? [];
    const known = GPU_COUNTS.filter((n) => rows(n).length), shared = known.filter((n) => n > 1);
    if (known.includes(gpus)) return rows(gpus);
    if (gpus === 1 || way.offload || !way.fused || shared.length < 2) return [];
    const [few, many] = [shared[0], shared.at(-1)];  // what a GPU keeps of a shared model goes by 1 / GPUs
    const share = (1 / few - 1 / gpus) / (1 / few - 1 / many);
    return rows(few).map((row, at) => ({ ...mixed(row, rows(many)[at], share), tokens: row.tokens,
      seconds: (gpus > 8 ? rows(many) : rows(few))[at].seconds }));
  };
  // Seconds of a step with several sequences of a length: what is fixed, by token, and by pair of tokens.
  const time = (points, gpu, length, batch) => {
    const known = points.map((point) => point.seconds[gpu]);
    if (known.some((seconds) => !seconds)) return NaN;
    const [[x, a], [y, b], [z, c]] = points.slice(-3).map((point, place) => [point.tokens, known.slice(-3)[place]]);
    const bend = ((c - a) / (z - x) - (b - a) / (y - x)) / (z - y), slope = (b - a) / (y - x) - bend * (x + y);
    const fixed = a - slope * x - bend * x * x;
    return Math.max(known[0] * Math.min(1, length * batch / points[0].tokens),
      Math.max(0, fixed) + batch * (slope * length + bend * length ** 2));
  };
  const scaled = (row, own, known, checkpoint) => {
    const by = ratios(own, known, checkpoint);
    const part = (of) => Object.fromEntries(Object.entries(of).map(([name, size]) => [name, size * (by[name] ?? 1)]));
    const from = row.moments ?? Object.fromEntries(Object.entries(row.parts).map(([name, size]) => [name, [size]]));
    const sizes = Array.from({ length: Object.values(from)[0].length }, (_, moment) =>
      part(Object.fromEntries(Object.entries(from).map(([name, line]) => [name, line[moment]]))));
    const peak = sizes.reduce((a, b) => total(b) > total(a) ? b : a), times = total(peak) / total(row.parts);
    return { ...row, parts: peak, needs: row.needs * times, least: row.least * times, host: row.host * by.host };
  };

  const shapeFields = Object.fromEntries(Object.entries(SHAPE).map(([name, label]) =>
    [name, { label, entry: true, value: models[reference][name] }]));
  const body = make("tbody"), heads = make("tr"), others = make("table", { className: "rows" });
  const table = make("table", { className: "rows" }, make("thead", {}, heads), body);
  const inside = make("p", { className: "legend" });
  const exactly = make("button", { type: "button" }, "Predict this exactly");
  let question;

  const update = (now, page) => {
    const own = now.model === OWN, base = own ? reference : now.model;
    const shape = own ? Object.fromEntries(Object.keys(SHAPE).map((name) => [name, Math.max(1, now[name])]))
      : models[base];
    if (own) shape.parameters = counted(shape);
    for (const name of Object.keys(SHAPE)) page.fields[name].parentElement.hidden = !own;
    const length = Math.min(longest, 256 * Math.round(2 ** now.tokens / 256));
    const batch = Math.min(now.batch, Math.floor(longest / length)), most = Number(now.gpus);
    page.set("batch", batch);
    if (now.states !== "bf16" && now.products === "fp8") page.set("products", now.products = "bf16");
    page.fields.products.disabled = now.states !== "bf16";
    const ways = [...checkpoints.map((checkpoint) => ({ checkpoint, offload: false, fused: true })),
      { checkpoint: "full", offload: true, fused: true }, { checkpoint: "none", offload: false, fused: false }]
      .map((way) => ({ ...way, states: now.states, products: now.products }));
    const tried = (gpu, limit) => ways.flatMap((way) => GPU_COUNTS.filter((n) => n <= limit).flatMap((n) => {
      const points = line(base, way, n).map((row) => own ? scaled(row, shape, models[base], way.checkpoint) : row);
      const { usable, most, fp8 } = gpus[gpu];
      if (!points.length || (way.products === "fp8" && !fp8)) return [];
      const row = between(points, length * batch), work = own ? flops(shape, length) / flops(models[base], length) : 1;
      const rank = row.needs <= usable ? 0 : row.least <= most ? 1 : 2, size = rank === 1 ? row.least : row.needs;
      let room = 0;
      for (let more = shortest; more <= longest && between(points, more).needs <= usable; more += 1024) room = more;
      const speed = n > 1 && Number.isNaN(time(points, gpu, length, batch)) ? NaN
        : length * batch / (time(points, gpu, length, batch) * work);
      const causes = { ...row.parts, "unused reserve": Math.max(0, size - total(row.parts)) };
      const name = `${way.checkpoint === "none" ? "no" : way.checkpoint} checkpointing`
        + `${way.offload ? ", CPU offload" : way.fused ? "" : ", nothing fused"}${n > 1 ? `, FSDP over ${n} GPUs` : ""}`;
      return [{ ...way, name, n, rank, size, room, speed, all: speed * n, host: row.host, causes }];
    }));
    const fast = (row) => -((now.order === "shortest" ? row.all : row.speed) || 0);
    const keys = (row) => [row.rank, ...row.rank < 2 ? [now.order === "fewest" ? row.n : 0, Math.sign(row.host),
      fast(row)] : [row.size]];
    const order = (a, b) => keys(a).map((key, place) => key - keys(b)[place]).find(Boolean) ?? 0;
    const rows = tried(now.gpu, most).sort(order), best = rows[0], { memory, usable } = gpus[now.gpu];
    const billion = now.train * 1e9, hours = (row) => billion / row.all / 3600;
    const long = (row) => !(row.all > 0) ? "–" : hours(row) < 48 ? `${digits(hours(row))} hours`
      : `${digits(hours(row) / 24)} days`;
    const here = `${best.n > 1 ? "each of " : ""}${best.n === 1 ? "one" : best.n} ${now.gpu}${best.n > 1 ? "s" : ""}`;
    const enough = best.n === 1 ? `One ${now.gpu} is enough: ` : `The fewest ${now.gpu}s that fit are ${best.n}: `;
    const fit = { fewest: enough, cheapest: "The least GPU time of those that fit takes ",
      shortest: "The fastest that fits is " }[now.order];
    const limit = most > 1 ? `up to ${most} ${now.gpu}s` : `one ${now.gpu}`;
    const told = [fit, "Nothing fits with room to spare. Tight is ", `${count(length * batch)} tokens a GPU do not fit `
      + `${limit}. The nearest is `][best.rank];
    const need = best.rank < 2 ? `, ${gib(best.size)} of ${gib(memory)} GiB on ${here}.`
      : `, which needs ${gib(best.size)} GiB of ${here}; a run may use ${gib(usable)}.`;
    const host = best.host > 1 ? ` It needs ${gib(best.host)} GiB of the host's memory, too.` : "";
    const each = best.n > 1 ? ` (${count(best.speed)} a GPU)` : "";
    const cost = best.n > 1 ? `, ${count(hours(best) * best.n)} GPU-hours` : "";
    const speed = best.rank < 2 && best.all > 0 ? ` It trains at ${count(best.all)} tokens/s${each}: `
      + `${digits(now.train)} billion tokens take ${long(best)}${cost}.` : "";
    const sequences = Math.floor(best.room / length), many = `${count(sequences)} sequence${sequences > 1 ? "s" : ""}`;
    const room = best.room ? ` It fits up to ${count(best.room)} tokens a GPU`
      + `${sequences ? `, ${many} of ${count(length)}` : ""}.` : "";
    page.say(told, make("b", {}, best.name), need + host + speed + room);
    const widest = 1.5 * memory;
    heads.replaceChildren(...["technique", `memory (line: ${gib(memory)} GiB)`, "verdict", "GiB needed",
      "tokens/s, all GPUs", "tokens/s of a GPU", `${digits(now.train)} B tokens`, "room for tokens"].map((head) =>
      make("th", { scope: "col" }, head)));
    const explain = (row) => inside.replaceChildren(make("b", {}, row.name, ": "), ...parts.filter((name) =>
      row.causes[name] >= 0.05).map((name) => {
      const box = make("i");
      box.style.background = color(name);
      return make("span", {}, box, `${name} ${gib(row.causes[name])}`);
    }));
    body.replaceChildren(...rows.map((row) => {
      const bar = make("div", { className: "bar", role: "img" });
      let end = 0;
      const shown = parts.filter((name) => row.causes[name] >= 0.05);
      const bands = shown.map((name) => `${color(name)} 0 ${Math.min(100, end += row.causes[name] / widest * 100)}%`);
      bar.style.background = `linear-gradient(90deg, ${bands.join()}, #0000 0)`;
      bar.setAttribute("aria-label", shown.map((name) => `${name} ${gib(row.causes[name])} GiB`).join(", "));
      if (row.size > widest) bar.append(make("span", {}, `${gib(row.size)} →`));
      const verdict = ["fits", "tight", "too large"][row.rank];
      const host = row.host > 1 ? [make("small", {}, `and ${gib(row.host)} GiB of the host`)] : [];
      const cells = [verdict, gib(row.size), count(row.all), count(row.speed), long(row), count(row.room)];
      const labels = ["", "GiB", "tokens/s in all", "tokens/s a GPU", "", "room for tokens"];
      return make("tr", { tabIndex: 0, onpointerenter: () => explain(row), onfocus: () => explain(row) },
        make("th", { scope: "row" }, row.name, ...host), make("td", {}, bar), ...cells.map((cell, place) => {
          const made = make("td", { className: place ? "" : ["fits", "tight", "large"][row.rank] },
            cell === "NaN" || cell === "0" ? "–" : cell);
          made.dataset.label = labels[place];
          return made;
        }));
    }));
    explain(best);
    const each = Object.keys(gpus).map((gpu) => {
      const [first] = tried(gpu, 64).filter((row) => row.rank === 0).sort((a, b) => a.n - b.n
        || Math.sign(a.host) - Math.sign(b.host) || b.speed - a.speed);
      return [gpu, gib(gpus[gpu].memory), first ? String(first.n) : "none", first?.name ?? "nothing up to 64 GPUs",
        first ? `${gib(first.size)}` : "–", first?.speed ? count(first.all) : "–"];
    });
    const cells = (tag, row) => make("tr", {}, ...row.map((cell) => make(tag, {}, cell)));
    others.replaceChildren(make("caption", {}, "The fewest GPUs of each kind that fit"), make("thead", {}, cells("th",
      ["GPU", "GiB", "GPUs", "technique", "GiB needed", "tokens/s, all"])), make("tbody", {}, ...each.map((row) =>
      cells("td", row))));
    const { checkpoint, offload, fused, n } = best;
    question = { model: own ? Object.fromEntries(Object.keys(SHAPE).map((name) => [name, shape[name]])) : now.model,
      states: now.states, products: now.products, checkpoint, offload, fused, gpus: n, tokens: length * batch };
    page.list(["cause", "GiB"], parts.filter((name) => best.causes[name] >= 0.005).map((name) =>
      [name, digits(best.causes[name], 4)]));
    if (el.dataset.address !== undefined && page.started) {
      location.replace(`#${new URLSearchParams(Object.entries(page.fields).map(([name, field]) => [name, field.value]))}`);
    }
    page.started = true;
    page.draw(table, inside, others);
  };
  const asked = new URLSearchParams(el.dataset.address === undefined ? "" : location.hash.slice(1));
  const choices = (name, known, usual) => known.flat().includes(asked.get(name)) ? asked.get(name) : usual;
  const within = (name, usual) => asked.get(name) && Number.isFinite(Number(asked.get(name))) ? asked.get(name) : usual;
  const page = explorable(el, "Will it fit, and how fast?", "Set what you have and what you want.", {
    model: { label: "model", choices: [...Object.keys(models), OWN], value: choices("model",
      [...Object.keys(models), OWN], reference) },
    ...Object.fromEntries(Object.entries(shapeFields).map(([name, field]) => [name, { ...field,
      value: within(name, field.value) }])),
    gpu: { label: "GPU", choices: Object.keys(gpus), value: choices("gpu", Object.keys(gpus), "H100") },
    gpus: { label: "GPUs at most", choices: GPU_COUNTS, value: choices("gpus", GPU_COUNTS.map(String), 1) },
    tokens: { label: "tokens in a sequence", range: [Math.log2(shortest), Math.log2(longest), 0.25],
      value: within("tokens", 13), show: (power) => count(256 * Math.round(2 ** power / 256)) },
    batch: { label: "sequences on a GPU", range: [1, 32, 1], value: within("batch", 1) },
    states: { label: "weights and states", choices: states, value: choices("states", states, "bf16") },
    products: { label: "matrix products", choices: ["bf16", "fp8"], value: choices("products", ["bf16", "fp8"], "bf16") },
    train: { label: "tokens to train (billions)", entry: true, value: within("train", 1) },
    order: { label: "best is", choices: [["fewest", "the fewest GPUs"], ["cheapest", "the least GPU time"],
      ["shortest", "the shortest time"]], value: choices("order", ["fewest", "cheapest", "shortest"], "fewest") },
  }, update);
  if (ask) {
    page.form.append(exactly);
    exactly.onclick = async () => {
      page.say("Predicting, some seconds ...");
      const found = await ask(question);
      page.say(found.error ?? `lsai predict: the peak is ${gib(total(found.parts))} GiB, and the allocator needs `
        + `${gib(found.needs)} GiB.`);
    };
  }
};
