// Draws every chart of the page from its specification; a chart that fails says so in its place and leaves its table.
"use strict";
for (const [key, spec] of Object.entries(JSON.parse(document.getElementById("specifications").textContent))) {
  const place = document.getElementById(`chart-${key}`);
  const options = {
    renderer: "svg",
    actions: false,
    ast: true, // expressions are interpreted: the page forbids code made from text
    defaultStyle: false,
    tooltip: { disableDefaultStyle: true },
    bind: `#controls-${key}`,
  };
  vegaEmbed(place, spec, options)
    .then(() => { place.dataset.state = "drawn"; })
    .catch((error) => { place.dataset.state = "failed"; place.textContent = `This chart cannot be drawn (${error.message}); its table is below.`; });
}
