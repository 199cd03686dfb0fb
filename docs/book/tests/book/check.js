// What is wrong with the page that is open: a list of sentences. Everything that is folded is opened first.
const said = new Set();
document.querySelectorAll('details').forEach(details => { details.open = true; });

const width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth > width) {
    said.add(`scrolls sideways: ${document.documentElement.scrollWidth} of ${width}`);
}
// What is too wide scrolls in the frame of the text, or is cut off there, and the page does not. Code and tables
// scroll by themselves.
function isCutOff(element) {
    if (element.getBoundingClientRect().right <= width + 1) return false;
    for (let at = element; at && at.tagName !== 'MAIN'; at = at.parentElement) {
        if (['auto', 'scroll'].includes(getComputedStyle(at).overflowX)) return false;
    }
    return true;
}

function colour(text) {
    const parts = text.match(/[\d.]+/g).map(Number);
    return text.startsWith('color(srgb')
        ? { rgb: parts.slice(0, 3).map(part => part * 255), alpha: parts[3] ?? 1 }
        : { rgb: parts.slice(0, 3), alpha: parts[3] ?? 1 };
}

const over = (top, alpha, below) => below.map((part, at) => top[at] * alpha + part * (1 - alpha));

// The colour behind an element, and how opaque it is: what shines through from those around it is known.
const known = new Map();
function behind(element) {
    if (!element) return { back: [255, 255, 255], opacity: 1 };
    if (known.has(element)) return known.get(element);
    const around = behind(element.parentElement);
    const style = getComputedStyle(element);
    const { rgb, alpha } = colour(style.backgroundColor);
    const made = { back: over(rgb, alpha, around.back), opacity: around.opacity * Number(style.opacity) };
    known.set(element, made);
    return made;
}

function luminance(rgb) {
    const [r, g, b] = rgb.map(part => {
        const c = part / 255;
        return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

const dark = matchMedia('(prefers-color-scheme: dark)').matches;
if (document.documentElement.classList.contains('navy') !== dark) said.add('has not the colours that the reader prefers');

let judged = 0;
function contrast(element, style, what) {
    const { back, opacity } = behind(element);
    const { rgb, alpha } = colour(style.color);
    const front = over(rgb, alpha * opacity, back);
    const [light, dark] = [luminance(front), luminance(back)].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    judged += 1;
    if (ratio < 4.5) said.add(`contrast ${ratio.toFixed(2)}: ${element.tagName}.${element.className} ${what.slice(0, 30)}`);
}

for (const element of document.querySelectorAll('body *')) {
    if (element.closest('script, style, template, svg, noscript') || !element.checkVisibility({ opacityProperty: false, visibilityProperty: true })) continue;
    const own = [...element.childNodes].filter(node => node.nodeType === Node.TEXT_NODE).map(node => node.textContent).join('').trim();
    if (own) contrast(element, getComputedStyle(element), own);
    if (own && isCutOff(element)) said.add(`is cut off: ${element.tagName}.${element.className} ${own.slice(0, 30)}`);
    for (const pseudo of element.matches('.line') ? ['::before', '::after'] : []) {
        const style = getComputedStyle(element, pseudo);
        if (style.content.length > 2 && style.content !== 'none' && style.content !== 'normal') contrast(element, style, style.content);
    }
}
for (const image of document.images) {
    if (!image.alt.trim()) said.add(`a picture without text: ${image.src}`);
    if (!image.complete || image.naturalWidth === 0) said.add(`a picture that is not shown: ${image.src}`);
}
if (judged < 3) said.add(`only ${judged} texts were judged`);
return [...said];
