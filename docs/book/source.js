// Colours sources and differences with mdBook's highlight.js. Each line is an element, which has its indentation in a
// first one, so that each is coloured by itself, from the state in which the line before left the language.
const highlighted = (language, line, state) => {
    const space = line.firstElementChild;
    const text = line.textContent.slice(space.textContent.length);
    const coloured = hljs.highlight(language, text, true, state);
    line.innerHTML = space.outerHTML + coloured.value;
    return coloured.top;
};
for (const code of document.querySelectorAll('[data-language]')) {
    // A service of systemd has the form of a TOML file.
    const language = { service: 'toml' }[code.dataset.language] ?? code.dataset.language;
    if (!globalThis.hljs?.getLanguage(language)) continue;
    // A line that was removed follows the lines before the change, one that was added those after it.
    let before, after;
    for (const line of code.querySelectorAll('.line:not([aria-hidden])')) {
        if (line.textContent.trim() === '...') {
            before = after = undefined;
        } else if (line.tagName === 'DEL') {
            before = highlighted(language, line, before);
        } else {
            after = highlighted(language, line, after);
            if (line.tagName !== 'INS') before = after;
        }
    }
}

// The meaning of a word stands below it while it has the mouse or the focus. Escape puts it away; a finger that taps
// shows it, and a second tap follows the link.
addEventListener('keydown', event => {
    if (event.key === 'Escape') document.documentElement.classList.add('quiet');
});
for (const term of document.querySelectorAll('.term')) {
    term.addEventListener('mouseenter', () => document.documentElement.classList.remove('quiet'));
    let hadFocus = false;
    term.addEventListener('pointerdown', () => { hadFocus = document.activeElement === term; });
    term.addEventListener('click', event => {
        if (event.pointerType !== 'touch' || hadFocus) return;
        document.documentElement.classList.remove('quiet');
        event.preventDefault();
        term.focus();
    });
}
