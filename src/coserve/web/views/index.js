// The views, in the order of the navigation. A view's module is loaded when it is first opened.

export const views = [
  { name: "now", title: "Now", load: () => import("./now.js") },
  { name: "keys", title: "Keys", load: () => import("./keys.js") },
  { name: "health", title: "Health", load: () => import("./health.js") },
];
