// Makes elements. All text is set as text nodes, so nothing that a job sends is read as markup.

const SVG = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  return build(document.createElement(name), attributes, children);
}

export function svgElement(name, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, name), attributes, children);
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value === true ? "" : value);
  }
}

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// How to start a job, for the end of a paragraph.
export function howToStart() {
  return ["Start one with ", element("code", {}, "adascale run deploy/adascalejob.yaml"), " on one machine, or ", element("code", {}, "kubectl apply -f deploy/adascalejob.yaml"), " on a cluster."];
}

// A table from columns [{title, isText, isLong, isMinor}] and rows of texts or nodes; the first cell names the row.
export function table(caption, columns, rows, isCurrent = () => false) {
  const kinds = columns.map((column) => [column.isText && "text", column.isLong && "text long", column.isMinor && "minor"].filter(Boolean).join(" ") || null);
  return element(
    "div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    element(
      "table", {},
      element("thead", {}, element("tr", {}, ...columns.map((column, at) => element("th", { scope: "col", class: kinds[at] }, column.title)))),
      element("tbody", {}, ...rows.map((row, number) => element(
        "tr", { class: isCurrent(number) ? "current" : null },
        ...row.map((cell, at) => element(at ? "td" : "th", { scope: at ? null : "row", class: kinds[at] }, cell)),
      ))),
    ),
  );
}
