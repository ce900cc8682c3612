"use strict";
// Copies what stands in the same block.
for (const button of document.querySelectorAll("button.copy")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
    } catch {
      // No clipboard, as on a page of a file in some browsers: select it instead.
      getSelection().selectAllChildren(code);
      button.textContent = "selected";
    }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
}
// A setting of the legend shows alone while the pointer is on it, and is switched off by a click.
for (const section of document.querySelectorAll("section.workload")) {
  const marks = (key) => section.querySelectorAll(`figure [data-k="${key}"], tr[data-k="${key}"]`);
  const show = (key) => {
    section.classList.toggle("focus", key !== null);
    for (const mark of section.querySelectorAll(".hot")) mark.classList.remove("hot");
    if (key !== null) for (const mark of marks(key)) mark.classList.add("hot");
  };
  for (const chip of section.querySelectorAll("[data-chip]")) {
    const key = chip.dataset.chip;
    chip.tabIndex = 0;
    chip.setAttribute("role", "switch");
    chip.setAttribute("aria-checked", "true");
    const toggle = () => {
      const off = chip.classList.toggle("off");
      chip.setAttribute("aria-checked", String(!off));
      for (const mark of marks(key)) mark.classList.toggle("off", off);
      if (off) show(null);
    };
    chip.addEventListener("click", toggle);
    chip.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        toggle();
      }
    });
    chip.addEventListener("pointerenter", (event) => {
      if (event.pointerType === "mouse" && !chip.classList.contains("off")) show(key);
    });
    chip.addEventListener("pointerleave", () => show(null));
  }
}
