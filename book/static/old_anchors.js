// The first page: links to sections of older versions of README.md lead to the pages that have the content now.
"use strict";

const OLD_ANCHORS = {
  "reading-order": "index.html#learning-path",
  "on-a-laptop": "docs/running.html#on-a-laptop",
  "on-one-gpu": "docs/running.html#on-one-gpu",
  "on-8-gpus": "docs/running.html#on-8-gpus",
  "on-several-nodes": "docs/running.html#on-several-nodes",
  "what-a-run-leaves": "docs/operations.html#files",
  "the-matrix": "docs/results.html#the-matrix",
  "what-the-trainer-costs": "docs/results.html#the-cost-of-the-trainer",
  "will-it-fit-and-how-fast-will-it-go": "docs/measuring.html#the-planner-will-it-fit-and-how-fast-will-it-be",
  "where-a-steps-time-goes": "docs/measuring.html#the-profiler-where-does-the-time-go",
  "suites": "docs/measuring.html#suites-many-runs-one-report",
};

function followOldAnchor() {
  const target = OLD_ANCHORS[decodeURIComponent(location.hash.slice(1))];
  if (target) location.replace(target);
}

addEventListener("hashchange", followOldAnchor);
followOldAnchor();
