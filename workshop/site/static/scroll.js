// On every page: let the keyboard scroll tables and code that are wider than the screen. Tables of results may be wider.
"use strict";

if (/(results|measuring)\.html$/.test(location.pathname)) document.querySelector("article")?.classList.add("results");

function focusScrollers() {
  for (const element of document.querySelectorAll(".table-wrapper, .math.scroll, .highlight pre, .cell_output")) {
    const isWide = element.scrollWidth > element.clientWidth;
    if (isWide) element.setAttribute("tabindex", "0");
    else element.removeAttribute("tabindex");
  }
}

addEventListener("load", focusScrollers);
addEventListener("resize", focusScrollers);
document.addEventListener("contentvisibilityautostatechange", focusScrollers, true); // a table is laid out only now
document.addEventListener("click", () => requestAnimationFrame(focusScrollers)); // an answer shows the hidden tables
