"use strict";
// Draws every figure with the page's own colours, again whenever the reader's light or dark changes.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const CONFIG = { responsive: true, displaylogo: false, modeBarButtons: [["resetScale2d", "toImage"]] };

function template() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = {
    gridcolor: colour("--grid"),
    linecolor: colour("--line"),
    tickcolor: colour("--line"),
    zerolinecolor: colour("--line"),
    tickfont: { color: colour("--muted"), size: 13 },
    title: { font: { color: colour("--muted"), size: 13 }, standoff: 8 },
    automargin: true,
  };
  return {
    layout: {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--ink"), size: 13, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: { bgcolor: colour("--surface"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--muted"), activecolor: colour("--accent") },
      xaxis: axis,
      yaxis: axis,
    },
  };
}

// A figure names the colours of a light ground.
function themed(figure) {
  const text = JSON.stringify(figure);
  return dark.matches ? JSON.parse(text.replace(/#[0-9a-f]{6}/g, (colour) => DARK[colour] ?? colour)) : JSON.parse(text);
}

function draw() {
  for (const place of document.querySelectorAll(".plot")) {
    const figure = themed(FIGURES[place.dataset.figure]);
    Plotly.react(place, figure.data, { ...figure.layout, template: template() }, CONFIG);
  }
}

dark.addEventListener("change", draw);
draw();
