import { App } from "./app.js";
import { listenToKeys } from "./keyboard.js";

const app = new App();
listenToKeys(app);
app.start();

document.querySelector(".skip").onclick = (event) => {
  event.preventDefault(); // The fragment of the address belongs to the views.
  document.getElementById("main").focus();
};
