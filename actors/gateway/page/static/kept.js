// Small choices that outlive a reload, in the browser's local storage: settings, what is folded. No key, no conversation.

export function kept(name) {
  try {
    return JSON.parse(localStorage.getItem(`mmrt-${name}`));
  } catch {
    return null; // a browser that keeps nothing, or another program's value
  }
}

export function keep(name, value) {
  try {
    localStorage.setItem(`mmrt-${name}`, JSON.stringify(value));
  } catch {
    // it is lost with the tab
  }
}
