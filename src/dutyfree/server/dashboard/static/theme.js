// Before the first paint: the theme that the reader chose. Without a choice, that of the system.
const chosen = localStorage.getItem("dutyfree.theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
