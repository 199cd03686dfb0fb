// Colours the page of a source with mdBook's highlight.js. Each line is an element, which has its number and its
// indentation, so that each is coloured by itself, from the state in which the line before left the language.
const source = document.querySelector('pre.source');
// A service of systemd has the form of a TOML file.
const language = { service: 'toml' }[source?.dataset.language] ?? source?.dataset.language;
if (language && hljs.getLanguage(language)) {
    let state;
    for (const line of source.children) {
        const space = line.firstElementChild;
        const text = line.textContent.slice(space.textContent.length);
        const coloured = hljs.highlight(language, text, true, state);
        line.innerHTML = space.outerHTML + coloured.value;
        state = coloured.top;
    }
}
