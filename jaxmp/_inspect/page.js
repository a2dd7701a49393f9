for (const button of document.querySelectorAll("button[data-open]"))
  button.addEventListener("click", () => {
    for (const module of document.querySelectorAll(".tree details"))
      module.open = button.dataset.open === "yes";
  });
