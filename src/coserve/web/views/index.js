// The views, in the order of the navigation. A view's module is loaded when it is first opened.

export const views = [
  { name: "now", title: "Now", load: () => import("./now.js") },
  { name: "playground", title: "Playground", load: () => import("./playground.js") },
  { name: "jobs", title: "Jobs", load: () => import("./jobs.js") },
  { name: "adapters", title: "Adapters", load: () => import("./adapters.js") },
  { name: "keys", title: "Keys", load: () => import("./keys.js") },
  { name: "health", title: "Health", load: () => import("./health.js") },
];
