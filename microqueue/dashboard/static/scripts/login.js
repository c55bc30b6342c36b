/* The form works without this script. It shows that the last attempt failed, and keeps the
   requested view, which is in the fragment of the address. The script loads before the form, so
   that the form cannot be submitted without it. */

document.addEventListener("submit", ({ target }) => {
  target.action = `login${location.hash}`;
});
document.addEventListener("DOMContentLoaded", () => {
  document.getElementById("failed").hidden = !new URLSearchParams(location.search).has("failed");
});
