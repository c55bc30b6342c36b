/* The form works without this. It says that the last try was wrong, and keeps the view that was
   asked for: it stands in the fragment, which the browser carries over to where it is sent. */

const form = document.querySelector("form");
form.action = `login${location.hash}`;
document.getElementById("failed").hidden = !new URLSearchParams(location.search).has("failed");
