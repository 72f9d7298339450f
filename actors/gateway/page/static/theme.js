// Light or dark, before anything is drawn: as chosen, or as the system has it. No module: those come after the first picture.

{
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => {
    try {
      return JSON.parse(localStorage.getItem("mmrt-theme")); // as kept.js writes it
    } catch {
      return null;
    }
  };
  const apply = () => {
    const theme = chosen();
    root.dataset.scheme = theme === "dark" || (theme !== "light" && system.matches) ? "dark" : "light";
    dispatchEvent(new Event("scheme"));
  };
  for (const [target, event] of [[system, "change"], [window, "theme"], [window, "storage"]]) target.addEventListener(event, apply);
  apply();
}
