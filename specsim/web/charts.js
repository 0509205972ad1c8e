// Charts of an answer: Vega-Lite views that are kept while only their data change.
"use strict";

const EMBED = {
  renderer: "svg",
  actions: false,
  ast: true, // expressions are interpreted: the page's policy forbids making code of text
  defaultStyle: false,
  tooltip: { disableDefaultStyle: true, theme: "page" },
};

// A specification with its data taken out and named, and the data by name.
function apart(spec) {
  const datasets = {};
  const shape = JSON.parse(JSON.stringify(spec), (key, value) => {
    if (key !== "data" || !value || !Array.isArray(value.values)) return value;
    const name = `d${Object.keys(datasets).length}`;
    datasets[name] = value.values;
    return { name };
  });
  return { shape, datasets };
}

function element(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...children);
  return found;
}

function said(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  return value.toLocaleString("en", { maximumSignificantDigits: 6 });
}

function table(into, columns, rows, caption) {
  const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
  const body = rows.map((row) =>
    element("tr", {}, ...row.map((value, at) => {
      const cell = at ? element("td", {}, said(value)) : element("th", { scope: "row" }, said(value));
      if (typeof value === "number") cell.className = "number";
      return cell;
    })));
  into.replaceChildren(...(caption ? [element("caption", { class: "unseen" }, caption)] : []),
    element("thead", {}, head), element("tbody", {}, ...body));
}

function frame(chart) {
  const title = element("h2", { id: `${chart.key}-title` }, chart.title);
  const about = element("p", { class: "about" });
  const picture = element("div", { class: "picture" });
  const data = element("table");
  const name = `${chart.key}-table`;
  const details = element("details", { class: "data" },
    element("summary", { id: name }, "The same as a table"),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": name }, data));
  const figure = element("figure", { "aria-labelledby": `${chart.key}-title`, "data-chart": chart.key },
    element("figcaption", {}, title, about), picture, details);
  details.addEventListener("toggle", () => details.open && fill());
  const fill = () => table(data, kept.chart.table.columns, kept.chart.table.rows, kept.chart.title);
  const kept = { figure, about, picture, details, fill, shape: "", view: null, chart, turn: Promise.resolve() };
  return kept;
}

async function draw(kept, chart) {
  const { shape, datasets } = apart(chart.spec);
  const key = JSON.stringify(shape);
  if (kept.view && kept.shape === key) {
    for (const [name, values] of Object.entries(datasets)) kept.view.data(name, values);
    await kept.view.runAsync();
    return;
  }
  kept.result?.finalize();
  kept.result = await vegaEmbed(kept.picture, { ...shape, datasets }, EMBED);
  kept.view = kept.result.view;
  kept.shape = key;
}

const places = new Map(); // element -> the charts that it shows, by key

// Show the charts of an answer. A chart that is still being drawn takes the newest data when it is done.
function showCharts(into, charts) {
  if (!places.has(into)) places.set(into, new Map());
  const shown = places.get(into);
  const keys = charts.map((chart) => chart.key);
  for (const [key, kept] of shown) {
    if (keys.includes(key)) continue;
    kept.figure.remove();
    kept.result?.finalize();
    shown.delete(key);
  }
  charts.forEach((chart, at) => {
    let kept = shown.get(chart.key);
    if (!kept) {
      kept = frame(chart);
      shown.set(chart.key, kept);
      into.insertBefore(kept.figure, into.children[at] || null);
    }
    kept.chart = chart;
    kept.about.textContent = chart.about;
    if (kept.details.open) kept.fill();
    if (!kept.busy) {
      kept.busy = true;
      kept.turn = (async () => {
        for (let drawn = null; drawn !== kept.chart;) {
          drawn = kept.chart;
          await draw(kept, drawn);
        }
      })().catch((error) => { kept.about.textContent = `This chart cannot be drawn: ${error.message}`; })
        .finally(() => { kept.busy = false; });
    }
  });
  return Promise.all([...shown.values()].map((kept) => kept.turn));
}
