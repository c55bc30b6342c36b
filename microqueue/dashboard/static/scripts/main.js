import { App } from "./app.js";
import { handleShortcuts } from "./keyboard.js";

const app = new App();
handleShortcuts(app);
app.start();

document.querySelector(".skip").onclick = (event) => {
  event.preventDefault(); // The fragment of the address selects the view.
  document.getElementById("main").focus();
};
