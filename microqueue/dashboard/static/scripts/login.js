/* The form works without this. It says that the last try was wrong, and keeps the view that was
   asked for: it stands in the fragment, which the browser carries over to where it is sent.
   It is read before the form is there, so that nobody can be quicker with the form. */

document.addEventListener("submit", ({ target }) => {
  target.action = `login${location.hash}`;
});
document.addEventListener("DOMContentLoaded", () => {
  document.getElementById("failed").hidden = !new URLSearchParams(location.search).has("failed");
});
