// Runs before the first paint, so that a chosen theme does not flash. Without a choice the system's counts.
{
  let theme = null;
  try { theme = localStorage.getItem("coserve-theme"); } catch { /* storage is off: the system's */ }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
