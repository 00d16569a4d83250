// Plots: draws every <figure class="plot" data-plot="…"> with uPlot. Each page also has a table of
// the same numbers, for browsers without scripts.
"use strict";

const UNITS = ["", "K", "M", "G", "T", "P"];

function shown(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "bytes") {
    let step = 0;
    while (Math.abs(value) >= 1000 && step < UNITS.length - 1) { value /= 1024; step += 1; }
    return `${value.toFixed(step ? 1 : 0)} ${UNITS[step]}${step ? "iB" : "B"}`;
  }
  const text = Math.abs(value) >= 100 ? value.toFixed(0) : String(Math.round(value * 100) / 100);
  return unit ? `${text} ${unit}` : text;
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  const one = (name) => style.getPropertyValue(name).trim();
  return { text: one("--text"), line: one("--line"), series: ["--busy", "--bad", "--good", "--wait", "--off"].map(one) };
}

function draw(figure) {
  const plot = JSON.parse(figure.dataset.plot);
  const { text, line, series } = colours();
  const dashes = [[], [6, 4], [2, 3], [8, 3, 2, 3]];
  const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
  // Bars of counts, not of times, are placed at whole numbers.
  const counted = plot.bars && !plot.is_time;
  const size = () => ({ width: Math.max(280, figure.clientWidth), height: 240 });
  const options = {
    ...size(),
    title: plot.title,
    scales: {
      x: { time: plot.is_time, ...(counted ? { range: (_, least, most) => [least - 0.6, most + 0.6] } : {}) },
      y: plot.bars ? { range: (_, least, most) => [Math.min(0, least), most > 0 ? most * 1.05 : 1] } : {},
    },
    axes: [counted ? { ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] } : axis, { ...axis, size: 80, values: (_, ticks) => ticks.map((tick) => shown(tick, plot.unit)) }],
    series: [{}, ...plot.series.map(([label], index) => ({
      label,
      stroke: series[index % series.length],
      dash: dashes[index % dashes.length],
      width: 2,
      fill: plot.bars ? `${series[index % series.length]}55` : undefined,
      points: { show: !plot.bars && plot.x.length < 60 },
      paths: plot.bars ? uPlot.paths.bars() : undefined,
      value: (_, value) => shown(value, plot.unit),
    }))],
  };
  if (plot.is_time && plot.zone) options.tzDate = (seconds) => uPlot.tzDate(new Date(seconds * 1000), plot.zone);
  const drawn = new uPlot(options, [plot.x, ...plot.series.map(([, values]) => values)], figure);
  new ResizeObserver(() => drawn.setSize(size())).observe(figure);
}

function drawAll(root) {
  for (const figure of root.querySelectorAll("figure.plot[data-plot]:not([data-drawn])")) {
    figure.dataset.drawn = "";
    draw(figure);
  }
}

drawAll(document);
document.addEventListener("htmx:load", (event) => drawAll(event.detail.elt.parentNode ?? document));
