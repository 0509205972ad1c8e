// The planner page. Its state is what the user chose, by the command line's option names; all else is the server's answer.
"use strict";

const $ = (id) => document.getElementById(id);
const LINES = { sglang: "sglang-args", vllm: "vllm-args" };
const ACCEPT = ["accept-rate", "accept-length", "accept-profile", "accept-per-position"];
const PLAIN = ["num-steps", "topk", "ep", "dp-attention", "routing"];
const SPECULATION = ["draft-tokens", "num-steps", "topk", ...ACCEPT];
const DECIDED_BY_LINE = ["model", "draft", "engine", "method", "tp", "ep", "dp-attention", "draft-tokens", "num-steps", "topk", "eager"];
const KINDS = ["model", "draft", "hardware"];
const range = (first, last, step = 1) => Array.from({ length: Math.round((last - first) / step) + 1 }, (_, i) => +(first + i * step).toFixed(4));

const SLIDERS = {
  "batch": { stops: [...range(1, 8), ...range(10, 16, 2), ...range(20, 32, 4), ...range(40, 64, 8), ...range(80, 128, 16), ...range(160, 256, 32), ...range(320, 512, 64)], unit: "sequences" },
  "context": { stops: [0, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536, 98304, 131072, 196608, 262144], unit: "tokens" },
  "draft-tokens": { stops: range(2, 16), unit: "tokens" },
  "tp": { stops: [1, 2, 4, 8], unit: "ranks" },
  "accept-rate": { stops: range(0, 1, 0.01), unit: "" },
  "accept-length": { stops: range(1, 8, 0.05), unit: "tokens a cycle" },
};

// What the page calls an option: its label.
const NAMED = { "sglang-args": "Launch line", "vllm-args": "Launch line", "eager": "Without CUDA graphs", "accept-profile": "Acceptance", "accept-per-position": "Rates by position" };

let options = {}; // option name -> text (eager: list of texts)
let files = {}; // kind -> { id, name, file, raw }: raw is there when it was dropped in this page
let choices = null;
let answer = null;

// --- asking -----------------------------------------------------------------------------------------------------------

const request = () => ({ options, files: Object.fromEntries(Object.entries(files).map(([kind, file]) => [kind, file.id])) });

function post(address, body, more = {}) {
  return fetch(address, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), ...more });
}

// One request at a time: moves made meanwhile are one more request, of the newest state. One that takes long is given up.
let current = null;
let again = false;
let planned = 0;
let movedAt = 0;

function changed() {
  movedAt = performance.now();
  if (!planned) planned = requestAnimationFrame(ask);
}

async function ask() {
  planned = 0;
  if (current) {
    again = true;
    if (performance.now() - current.since > 250) current.stop.abort();
    return;
  }
  const mine = { since: performance.now(), stop: new AbortController() };
  const of = movedAt;
  current = mine;
  again = false;
  try {
    const response = await post("predict", request(), { signal: mine.stop.signal });
    const body = await response.json();
    if (response.status === 409 && await sendAgain(body.missing)) again = true;
    else if (!response.ok) refuse(body.error);
    else await show(body, of);
  } catch (error) {
    if (error.name !== "AbortError") refuse("no answer: is specsim serve still running?");
  } finally {
    current = null;
    if (again) ask();
  }
}

// Files that the server has forgotten are sent again where this page has them.
async function sendAgain(kinds) {
  for (const kind of kinds) {
    if (!files[kind]?.raw) return false;
    const sent = await send(kind, files[kind].file, files[kind].raw);
    if (!sent) return false;
  }
  return true;
}

async function send(kind, name, raw) {
  const headers = { "content-type": "application/octet-stream", "x-name": encodeURIComponent(name) };
  const response = await fetch(`file/${kind}`, { method: "POST", headers, body: raw });
  const body = await response.json();
  if (!response.ok) {
    refuse(body.error);
    return null;
  }
  files[kind] = { ...body, raw };
  return files[kind];
}

// --- showing ----------------------------------------------------------------------------------------------------------

let saying = 0;

// Screen readers hear of the newest verdict once the user pauses, not of every step of a slider.
function announce(text) {
  clearTimeout(saying);
  saying = setTimeout(() => { $("announce").textContent = text; }, 600);
}

// The command line's options by the names that they have on the page.
function inWords(text) {
  return text.replace(/--([a-z][a-z-]*)/g, (flag, name) => (NAMED[name] ? `“${NAMED[name]}”` : flag));
}

function refuse(text) {
  $("error").textContent = inWords(text);
  if (!answer) $("verdict").textContent = "No prediction yet.";
  $("details").hidden = !answer;
  document.body.dataset.state = "refused";
  resolved();
  remember();
}

async function show(found, since) {
  answer = found;
  $("error").textContent = "";
  $("details").hidden = false;
  $("headline").textContent = found.headline;
  $("verdict").textContent = found.verdict;
  $("answer").dataset.mood = found.mood;
  announce(found.verdict);
  figures(found.figures);
  document.body.dataset.state = "shown";
  controls();
  document.body.dataset.verdictMs = (performance.now() - since).toFixed(1);
  const { sglang, vllm } = found.launch;
  Object.entries({ command: found.command, sglang, vllm }).forEach(([id, text]) => { $(id).textContent = text; });
  const rows = found.rows.map(([what, value, unit, interval, origin]) => [what, `${value}\u00a0${unit}`.trim(), interval, origin.replaceAll(" %", "\u00a0%")]);
  table($("numbers"), ["", "value", "80 % interval", "origin"], rows, "Every number");
  $("notes").replaceChildren(...found.warnings.map((note) => element("li", {}, inWords(note))));
  $("notes-box").hidden = !found.warnings.length;
  remember();
  sources();
  survey();
  await showCharts($("charts"), found.charts);
  document.body.dataset.chartsMs = (performance.now() - since).toFixed(1);
}

// Sources are many rows, so they are asked for when somebody looks, and again when moves pause.
let sourcing = 0;

function sources() {
  clearTimeout(sourcing);
  if ($("sources-box").open) sourcing = setTimeout(showSources, 300);
}

async function showSources() {
  try {
    const response = await post("document", request());
    if (!response.ok) return;
    const found = (await response.json()).sources;
    const spread = (share) => (share === null ? "" : `${+(100 * share).toPrecision(2)} %`);
    const rows = found.map((one) => [one.of, one.kind, spread(one.relative_uncertainty), one.date, one.reference]);
    table($("sources"), ["of", "kind", "±", "date", "where"], rows, "Sources");
  } catch { /* the next prediction says that there is no server */ }
}

// The chart of draft lengths takes longer, so it is asked for when moves pause, and only when it would change.
let surveying = 0;
let surveyed = "";

// What the chart depends on: all but batch and context, which are its axes.
function ground() {
  const { batch, context, ...rest } = options;
  return JSON.stringify({ ...request(), options: rest });
}

function survey() {
  clearTimeout(surveying);
  const wanted = ground();
  if (wanted === surveyed) return;
  $("around").dataset.state = "old";
  surveying = setTimeout(async () => {
    try {
      const response = await post("around", JSON.parse(wanted));
      const { charts } = await response.json();
      if (!response.ok || wanted !== ground()) return;
      surveyed = wanted;
      await showCharts($("around"), charts);
      $("around").dataset.state = "drawn";
    } catch { /* the next prediction says that there is no server */ }
  }, 300);
}

function figures(list) {
  $("figures").replaceChildren(...list.map(({ name, value, unit, interval }) => element("div", {},
    element("dt", {}, name),
    element("dd", {}, element("b", {}, value), unit ? ` ${unit}` : "", element("small", {}, interval)))));
  tile();
}

// Rows of as many figures each as can be; what would stand alone in the last row makes room for itself in the first.
function tile() {
  const list = $("figures");
  const [rem, gap] = [parseFloat(getComputedStyle(document.documentElement).fontSize), parseFloat(getComputedStyle(list).columnGap) || 0];
  const count = list.children.length;
  const most = Math.max(2, Math.floor((list.clientWidth + gap) / (9 * rem + gap)));
  const columns = Math.ceil(count / Math.ceil(count / most)) || 1;
  list.style.setProperty("--columns", columns);
  list.classList.toggle("odd", columns > 1 && count % columns === 1);
}

// Every control as the state and the answer have it; what the user is typing in stays as it is.
function controls() {
  const scenario = answer?.scenario ?? {};
  const typing = document.activeElement;
  const put = (field, text) => { if (field !== typing || field.tagName === "SELECT" || field.type === "range") field.value = text; };
  const found = { "draft-tokens": scenario.draft_tokens, "num-steps": scenario.num_steps, "topk": scenario.topk, "batch": scenario.batch,
    "context": scenario.context, "tp": scenario.tp, "ep": scenario.ep, "routing": scenario.routing, "accept-rate": answer?.accept_rate, "accept-length": answer?.accept_length };
  if (answer) SLIDERS.tp.stops = range(1, answer.gpus).filter((n) => answer.gpus % n === 0);
  SLIDERS["accept-length"].stops = range(1, Math.max(2, scenario.draft_tokens ?? 3), 0.05);
  for (const row of document.querySelectorAll(".slide")) {
    const name = row.dataset.option;
    const [slider, number] = row.querySelectorAll("input");
    const { stops, unit } = SLIDERS[name];
    const value = name in options ? options[name] : found[name] ?? "";
    const amount = amountOf(value);
    slider.max = stops.length - 1;
    if (slider !== dragged) slider.value = nearest(stops, amount);
    slider.setAttribute("aria-valuetext", `${value} ${unit}`.trim());
    put(number, value);
    row.querySelector(".back")?.toggleAttribute("hidden", !(name in options));
  }
  for (const name of PLAIN) {
    put($(name), options[name] ?? "");
    if (found[name] !== undefined) $(name).placeholder = found[name];
  }
  const kind = ACCEPT.find((name) => name in options) ?? "";
  $("accept").value = kind;
  document.querySelectorAll("[data-accept]").forEach((row) => { row.hidden = row.dataset.accept !== kind; });
  document.querySelectorAll('[data-option^="accept-"]').forEach((row) => { row.hidden = row.dataset.option !== kind; });
  put($("accept-profile"), options["accept-profile"] ?? $("accept-profile").value);
  put($("accept-per-position"), options["accept-per-position"] ?? "");
  const off = scenario.method === "none";
  document.querySelectorAll("#draft-tokens, #draft-tokens-number, #accept").forEach((field) => { field.disabled = off; });
  $("engine").value = options.engine ?? scenario.engine ?? "sglang";
  $("method").value = options.method ?? "";
  $("draft").value = options.draft ? presetOf(options.draft) ?? "" : "";
  pick("hardware", options.hardware ?? scenario.hardware);
  pick("model", presetOf(options.model) ?? options.model ?? scenario.model);
  resolved();
  for (const kindOfFile of KINDS) {
    const row = document.querySelector(`.pick[data-kind=${kindOfFile}]`);
    const file = files[kindOfFile];
    row.querySelector(".chip").hidden = !file;
    row.querySelector(".chip span").textContent = file ? `${file.file}${file.about ? ` (${file.about})` : ""}` : "";
    row.querySelector("select").disabled = Boolean(file);
  }
  document.querySelectorAll("[name=eager]").forEach((box) => { box.checked = (options.eager ?? []).includes(box.value); });
  put($("line"), options[LINES.sglang] ?? options[LINES.vllm] ?? "");
  if ($("line").value) $("line-box").open = true;
}

// What is none of the choices, such as a dropped file, stands in a place of its own.
function pick(id, name) {
  $(id).options[0].textContent = name ?? "";
  $(id).value = name ?? "";
  if ($(id).selectedIndex < 0) $(id).value = "";
  $(id).title = $(id).selectedOptions[0].textContent;
}

// Draft and method that nobody chose, as the prediction has them.
function resolved() {
  const scenario = document.body.dataset.state === "shown" ? answer.scenario : null;
  const by = pasted() ? "of the launch line" : "automatic";
  for (const id of ["draft", "method"]) {
    const own = options[id] || (id === "draft" && files.draft);
    $(id).options[0].textContent = own || !scenario ? "automatic" : `${scenario[id] ?? "none"}, ${by}`;
    if (id === "draft" && files.draft) $(id).options[0].textContent = files.draft.name ?? files.draft.file;
    $(id).title = $(id).selectedOptions[0]?.textContent ?? "";
  }
}

function amountOf(text) {
  const [, number, suffix] = /^\s*([\d.]+)\s*([km]?)/i.exec(String(text)) ?? [];
  return number === undefined ? NaN : Number(number) * ({ k: 1024, m: 1048576 }[suffix?.toLowerCase()] ?? 1);
}

function nearest(stops, amount) {
  let best = 0;
  stops.forEach((stop, at) => { if (Math.abs(stop - amount) < Math.abs(stops[best] - amount)) best = at; });
  return best;
}

function presetOf(name) {
  return choices.models.find((model) => model.name.toLowerCase() === (name ?? "").toLowerCase())?.name;
}

// --- choosing ---------------------------------------------------------------------------------------------------------

function set(name, value) {
  if (value === "" || value === null || (Array.isArray(value) && !value.length)) delete options[name];
  else options[name] = value;
  changed();
}

const drop = (...names) => names.forEach((name) => { delete options[name]; });
const pasted = () => Boolean(options[LINES.sglang] ?? options[LINES.vllm]);

function setDraftTokens(text) {
  set("draft-tokens", text);
  const tree = amountOf(options.topk ?? answer?.scenario.topk ?? 1) > 1;
  if (tree) return;
  drop("num-steps");
  // A launch line has its own number of steps: the choice is made for both.
  if (pasted() && "draft-tokens" in options && amountOf(text) > 1) options["num-steps"] = String(amountOf(text) - 1);
}

let dragged = null;

function listen() {
  for (const row of document.querySelectorAll(".slide")) {
    const name = row.dataset.option;
    const [slider, number] = row.querySelectorAll("input");
    const choose = name === "draft-tokens" ? setDraftTokens : (text) => set(name, text);
    slider.min = 0;
    slider.addEventListener("input", () => {
      dragged = slider;
      number.value = SLIDERS[name].stops[slider.value];
      choose(String(SLIDERS[name].stops[slider.value]));
    });
    slider.addEventListener("change", () => { dragged = null; });
    number.addEventListener("input", () => choose(number.value.trim()));
    number.addEventListener("blur", controls);
    row.querySelector(".back")?.addEventListener("click", () => { drop(name, ...(name === "draft-tokens" ? ["num-steps"] : [])); changed(); slider.focus(); });
  }
  PLAIN.forEach((name) => $(name).addEventListener("input", () => {
    if (name === "topk" && answer && amountOf($(name).value) > 1) { // a tree needs both said: as they are shown
      options["draft-tokens"] ??= String(answer.scenario.draft_tokens);
      options["num-steps"] ??= String(answer.scenario.num_steps);
    }
    set(name, $(name).value.trim());
  }));
  $("engine").addEventListener("change", () => {
    if (pasted()) putLine("");
    set("engine", $("engine").value);
  });
  $("model").addEventListener("change", () => {
    if (pasted()) { // its draft and experts are those of its own model
      putLine("");
      options.engine = $("engine").value;
    }
    drop("draft", "method");
    set("model", $("model").value);
  });
  $("draft").addEventListener("change", () => set("draft", $("draft").value));
  $("hardware").addEventListener("change", () => {
    const box = choices.boxes.find((one) => one.name === $("hardware").value);
    if (box && amountOf(options.tp ?? 1) > box.gpus) drop("tp");
    set("hardware", $("hardware").value);
  });
  $("method").addEventListener("change", () => {
    if (["none", "ngram"].includes($("method").value)) drop("draft");
    if ($("method").value === "none") drop(...SPECULATION);
    set("method", $("method").value);
  });
  $("accept").addEventListener("change", () => {
    const kind = $("accept").value;
    const known = answer ?? {};
    const start = { "accept-rate": known.accept_rate ?? 0.6, "accept-length": known.accept_length ?? 2, "accept-profile": fittingProfile(), "accept-per-position": "0.7,0.6,0.5" };
    drop(...ACCEPT);
    if (kind) options[kind] = String(start[kind]);
    controls();
    changed();
  });
  $("accept-profile").addEventListener("change", () => set("accept-profile", $("accept-profile").value));
  $("accept-per-position").addEventListener("input", () => set("accept-per-position", $("accept-per-position").value.trim()));
  document.querySelectorAll("[name=eager]").forEach((box) => box.addEventListener("change", () =>
    set("eager", [...document.querySelectorAll("[name=eager]:checked")].map((one) => one.value))));
  $("line").addEventListener("input", () => putLine($("line").value.trim()));
  document.querySelectorAll("input[type=file]").forEach((field) => field.addEventListener("change", () => {
    if (field.files[0]) take(field.closest(".pick").dataset.kind, field.files[0]);
    field.value = "";
  }));
  document.querySelectorAll(".chip button").forEach((button) => button.addEventListener("click", () => {
    const { kind } = button.closest(".pick").dataset;
    delete files[kind];
    controls();
    changed();
    $(kind).focus();
  }));
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("reset").addEventListener("click", () => { restart(); $("line").value = ""; controls(); changed(); });
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the fragment is the state's
    $("details").focus();
  });
  $("sources-box").addEventListener("toggle", sources);
  $("copy-link").addEventListener("click", copyLink);
  document.querySelectorAll("[data-download]").forEach((button) => button.addEventListener("click", () => download(button.dataset.download)));
  addEventListener("hashchange", () => { if (location.hash !== written) { recall(); controls(); changed(); } });
  new ResizeObserver(tile).observe($("figures"));
  listenForDrops();
}

// A pasted line decides anew what a line decides; what it cannot say (box, load, acceptance) stays.
function putLine(text) {
  if (text && !pasted()) {
    drop(...DECIDED_BY_LINE);
    delete files.model;
    delete files.draft;
  }
  drop(LINES.sglang, LINES.vllm);
  if (text) {
    const vllm = /(^|[\s/])vllm([\s-]|$)|vllm\.entrypoints|--tensor-parallel-size|--speculative-config/.test(text) && !/sglang/.test(text);
    options[vllm ? LINES.vllm : LINES.sglang] = text;
  }
  changed();
}

function fittingProfile() {
  const draft = answer?.scenario.draft ?? "";
  return choices.acceptance.find((name) => name.startsWith(`${draft}/`)) ?? choices.acceptance[0];
}

// --- dropped files ----------------------------------------------------------------------------------------------------

async function take(kind, file) {
  if (file.size > 2 ** 20) {
    refuse(`${file.name}: is larger than 1024 KiB`);
    return;
  }
  try {
    const kept = { ...files };
    const sent = await send(kind, file.name, await file.arrayBuffer());
    if (sent) {
      if (kind === "model" && sent.drafter) { // a drafter is known by its config, wherever it was dropped
        files = { ...kept, draft: sent };
        kind = "draft";
      }
      if (kind === "model" && !pasted()) drop("draft", "method");
      if (kind === "draft" && !pasted()) drop("method");
      drop(kind);
      controls();
      changed();
    }
  } catch {
    refuse(`${file.name}: cannot be read or sent`);
  }
}

function listenForDrops() {
  const over = (event) => event.target instanceof Element ? event.target.closest(".pick") : null;
  addEventListener("dragover", (event) => {
    event.preventDefault();
    document.querySelectorAll(".pick").forEach((row) => row.classList.toggle("over", row === over(event)));
    document.body.classList.add("dragging");
  });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dragging"); });
  addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dragging");
    document.querySelectorAll(".pick").forEach((row) => row.classList.remove("over"));
    for (const file of event.dataTransfer.files) {
      const yaml = /\.ya?ml$/i.test(file.name);
      take(yaml ? "hardware" : over(event)?.dataset.kind ?? "model", file);
    }
  });
}

// --- links and downloads ----------------------------------------------------------------------------------------------

let written = location.hash;
let writing = 0;

// The state is the address's fragment, which no browser sends anywhere. Written when moves pause: browsers limit how often.
function remember() {
  clearTimeout(writing);
  writing = setTimeout(write, 300);
}

function write() {
  clearTimeout(writing);
  const state = new URLSearchParams();
  for (const [name, value] of Object.entries(options)) for (const each of [value].flat()) state.append(name, each);
  for (const [kind, { id, file }] of Object.entries(files)) state.append(`${kind}-file`, `${id}/${file}`);
  // No empty fragment: Vega cuts a gradient's address from the page's, and a bare # would stay in it.
  history.replaceState(null, "", `${state}` ? `#${state}` : location.pathname + location.search);
  written = location.hash;
}

// The state that the page opens with when its address has none.
function restart() {
  options = { ...choices.start.options };
  files = { ...choices.start.files };
}

function recall() {
  written = location.hash;
  if (!written) {
    restart();
    return;
  }
  options = {};
  const before = files;
  files = {};
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const kind = name.replace(/-file$/, "");
    if (name.endsWith("-file") && KINDS.includes(kind)) {
      const [id, ...rest] = value.split("/");
      files[kind] = before[kind]?.id === id ? before[kind] : { id, file: rest.join("/") || "a file" };
    } else if (name === "eager") options.eager = [...(options.eager ?? []), value];
    else options[name] = value;
  }
}

async function copyLink() {
  write();
  const names = Object.values(files).map((file) => file.file);
  try {
    await navigator.clipboard.writeText(location.href);
  } catch {
    const field = element("textarea", { class: "unseen" }, location.href);
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  $("done").textContent = names.length
    ? `Link copied. It does not hold ${names.join(" and ")}: on another server the page asks to drop it again.`
    : "Link copied.";
}

async function download(what) {
  if (!answer) return;
  let name = "specsim-launch.txt";
  let text;
  if (what === "launch") {
    const { sglang, vllm, vllm_config: config } = answer.launch;
    text = `# SGLang\n${sglang}\n\n# vLLM\n${vllm}\n${config ? `\n# vLLM's --speculative-config\n${config}\n` : ""}`;
  } else {
    const response = await post(what, request());
    text = await response.text();
    if (!response.ok) {
      refuse(JSON.parse(text).error);
      return;
    }
    name = what === "csv" ? "specsim-prediction.csv" : "specsim-prediction.json";
  }
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "text/plain" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// --- start ------------------------------------------------------------------------------------------------------------

function offer(id, list, first) {
  $(id).replaceChildren(...(first === undefined ? [] : [new Option(first, "")]), ...list.map(([value, text]) => new Option(text ?? value, value)));
}

async function start() {
  document.querySelectorAll("label[for]").forEach((label) => { NAMED[label.htmlFor] ??= label.textContent; });
  choices = await (await fetch("choices")).json();
  const targets = choices.models.filter((model) => model.role === "target");
  const drafts = choices.models.filter((model) => model.role === "draft");
  const links = { none: "", nvlink: ", NVLink", pcie: ", PCIe" };
  offer("model", targets.map((model) => [model.name]), "");
  offer("draft", [], "automatic");
  $("draft").append(...[["Drafters", drafts], ["Whole models", targets]].map(([label, list]) => {
    const group = element("optgroup", { label });
    group.append(...list.map((model) => new Option(model.name, model.name)));
    return group;
  }));
  offer("hardware", choices.boxes.map((box) => [box.name, `${box.name} (${box.gpus} × ${box.gpu}${links[box.link] ?? ""})`]), "");
  ["model", "hardware"].forEach((id) => { $(id).options[0].hidden = true; });
  offer("engine", choices.engines.map((engine) => [engine.name, `${engine.name} ${engine.version}`]));
  offer("method", choices.methods.map((method) => [method]), "automatic");
  offer("accept-profile", choices.acceptance.map((name) => [name]));
  recall();
  listen();
  controls();
  changed();
}

start().catch(() => refuse("no answer: is specsim serve still running?"));
