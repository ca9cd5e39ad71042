// Draws the SVG of a chart on a canvas. An image of it would need a looser Content-Security-Policy.

const SCALE = 2, TITLE = 26, LEGEND = 22;

// Returns a PNG of a chart, with its title and, if it has several series, their names.
export async function pngOf(svg, title, series, hasLegend) {
  const { width, height } = svg.viewBox.baseVal;
  const canvas = document.createElement("canvas");
  canvas.width = SCALE * width;
  canvas.height = SCALE * (TITLE + height + (hasLegend ? LEGEND : 0));
  const context = canvas.getContext("2d");
  const page = getComputedStyle(document.body);
  context.scale(SCALE, SCALE);
  context.fillStyle = page.backgroundColor;
  context.fillRect(0, 0, width, canvas.height / SCALE);
  context.fillStyle = page.color;
  context.font = `600 14px ${page.fontFamily}`;
  context.fillText(title, 8, 18);
  context.translate(0, TITLE);
  draw(context, svg);
  if (hasLegend) {
    let x = 60;
    context.font = `12px ${page.fontFamily}`;
    for (const { name, style } of series) {
      const probe = svg.querySelector(`.stroke-${style}, .fill-${style}`);
      const color = probe && getComputedStyle(probe);
      context.fillStyle = (color && (color.stroke !== "none" ? color.stroke : color.fill)) || page.color;
      context.fillRect(x, height + 6, 14, 4);
      context.fillStyle = page.color;
      context.fillText(name, x + 18, height + 13);
      x += 30 + context.measureText(name).width;
    }
  }
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

function draw(context, node) {
  for (const child of node.children) {
    const style = getComputedStyle(child);
    if (style.visibility === "hidden") continue;
    const number = (name) => Number(child.getAttribute(name) ?? 0);
    context.save();
    context.globalAlpha *= Number(style.opacity);
    context.lineWidth = parseFloat(style.strokeWidth) || 1;
    context.setLineDash(style.strokeDasharray === "none" ? [] : style.strokeDasharray.split(/[ ,]+/).map(parseFloat));
    switch (child.tagName) {
      case "svg": {
        // The part of the axis that is shown.
        context.beginPath();
        context.rect(number("x"), number("y"), number("width"), number("height"));
        context.clip();
        draw(context, child);
        break;
      }
      case "g":
        draw(context, child);
        break;
      case "line":
        paint(context, style, new Path2D(`M${number("x1")} ${number("y1")}L${number("x2")} ${number("y2")}`));
        break;
      case "path":
        paint(context, style, new Path2D(child.getAttribute("d")));
        break;
      case "text":
        context.fillStyle = style.fill;
        context.font = `${style.fontSize} ${style.fontFamily}`;
        context.textAlign = { middle: "center", end: "right" }[child.getAttribute("text-anchor")] ?? "left";
        context.fillText(child.textContent, number("x"), number("y"));
        break;
    }
    context.restore();
  }
}

function paint(context, style, path) {
  if (style.fill !== "none") {
    context.fillStyle = style.fill;
    context.fill(path);
  }
  if (style.stroke !== "none") {
    context.strokeStyle = style.stroke;
    context.stroke(path);
  }
}
