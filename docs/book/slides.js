// The deck: one slide at a time where the window is wide enough (see slides.css), else all, one below the other.
// Its presenter's window is the same page, opened with ?presenter: it shows the notes, the next slide and a clock.
// The two tell each other by messages which slide is shown: pages that were opened as files may do nothing else.
const root = document.documentElement, slides = [...document.querySelectorAll('.slide')];
const presents = location.search === '?presenter';
root.classList.add('deck');
root.classList.toggle('presenter', presents);
// The window that this one has opened, or that has opened it.
let other = presents ? opener : null;

const now = () => Math.max(0, slides.findIndex(slide => `#${slide.id}` === location.hash));
const tell = message => other?.postMessage({ deck: message }, '*');
const isBlank = () => root.classList.contains('blank');
const blank = wanted => root.classList.toggle('blank', wanted);
const show = number => {
    const id = slides[Math.min(Math.max(number, 0), slides.length - 1)].id;
    blank(false);
    // The history has each slide that was shown: the browser's way back leads through them.
    if (location.hash !== `#${id}`) {
        location.hash = id;
        mark();
    } else tell({ id, blank: false });
};
const part = slide => slide.querySelector('footer a').getAttribute('href');
const mark = () => {
    const at = now();
    // The presenter sees the notes of a stage until there are others.
    const noted = slides.findLastIndex((slide, number) =>
        number <= at && part(slide) === part(slides[at]) && slide.querySelector('aside').childElementCount > 0);
    slides.forEach((slide, number) => {
        slide.classList.toggle('now', number === at);
        slide.classList.toggle('next', number === at + 1);
        slide.classList.toggle('noted', number === noted);
    });
};
addEventListener('hashchange', () => {
    mark();
    tell({ id: slides[now()].id, blank: isBlank() });
});
mark();

// Messages of the other window only. One that was loaded anew says so, and is told what is shown.
addEventListener('message', ({ source, origin, data }) => {
    if (origin !== location.origin && origin !== 'null' || !data?.deck) return;
    if (source !== other && source?.opener !== window) return;
    other = source;
    if (!presents) root.classList.add('presented');
    if (data.deck === 'hello') return tell({ id: slides[now()].id, blank: isBlank() });
    if (data.deck === 'bye') return root.classList.remove('presented');
    const slide = slides.find(slide => slide.id === data.deck.id);
    if (!slide) return;
    blank(data.deck.blank === true);
    if (location.hash !== `#${slide.id}`) location.replace(`#${slide.id}`);
});
if (presents) {
    tell('hello');
    addEventListener('pagehide', () => tell('bye'));
}

const actions = {
    next: () => show(now() + 1),
    back: () => show(now() - 1),
    first: () => show(0),
    last: () => show(slides.length - 1),
    full: () => (document.fullscreenElement ? document.exitFullscreen() : root.requestFullscreen()),
    blank: () => {
        blank();
        tell({ id: slides[now()].id, blank: isBlank() });
    },
    theme: () => {
        const isDark = root.classList.toggle('navy');
        try { localStorage.setItem('slides-theme', isDark ? 'navy' : 'light'); } catch { /* not kept */ }
    },
    present: () => {
        if (presents) return;
        if (other && !other.closed) return other.focus();
        other = open(`${location.pathname}?presenter${location.hash}`, 'presenter', 'popup,width=1200,height=750');
    },
    clock: () => { began = Date.now(); tick(); },
};
const keys = {
    ArrowRight: 'next', ArrowDown: 'next', PageDown: 'next', ' ': 'next', Enter: 'next',
    ArrowLeft: 'back', ArrowUp: 'back', PageUp: 'back', Backspace: 'back', Home: 'first', End: 'last',
    f: 'full', b: 'blank', '.': 'blank', d: 'theme', p: 'present', r: presents ? 'clock' : '',
};
// Where all slides are below each other, these scroll.
const scrolls = ['ArrowDown', 'ArrowUp', 'PageDown', 'PageUp', ' ', 'Home', 'End'];
const isOneAtATime = () => matchMedia('(min-width: 700px)').matches;
addEventListener('keydown', event => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    // A link, a button or a fold that has the focus is what these keys are for.
    if ([' ', 'Enter'].includes(event.key) && event.target.closest('a, button, summary')) return;
    if (scrolls.includes(event.key) && !isOneAtATime()) return;
    const action = actions[keys[event.key.length === 1 ? event.key.toLowerCase() : event.key]];
    if (!action) return;
    action();
    event.preventDefault();
});
for (const button of document.querySelectorAll('button[data-do]')) {
    button.addEventListener('click', () => actions[button.dataset.do]());
}

// By touch: a swipe, or a tap on the left or right third. Only where one slide is shown.
let touched;
const slideArea = document.querySelector('main');
slideArea.addEventListener('touchstart', ({ touches }) => {
    touched = touches.length === 1 ? { x: touches[0].clientX, y: touches[0].clientY, at: Date.now() } : null;
}, { passive: true });
slideArea.addEventListener('touchend', event => {
    if (!touched || !isOneAtATime() || visualViewport?.scale > 1.05) return;
    const { clientX, clientY } = event.changedTouches[0];
    const [x, y] = [clientX - touched.x, clientY - touched.y];
    const isTap = Math.hypot(x, y) < 10 && Date.now() - touched.at < 500;
    if (Math.abs(x) > 40 && Math.abs(x) > 2 * Math.abs(y)) actions[x < 0 ? 'next' : 'back']();
    else if (isTap && !event.target.closest('a, button, summary')) {
        if (clientX > innerWidth * 2 / 3) actions.next();
        else if (clientX < innerWidth / 3) actions.back();
    }
});

// The presenter's clock: since the window was opened, or since R.
let began = Date.now();
const tick = () => {
    const two = number => String(number).padStart(2, '0'), seconds = Math.floor((Date.now() - began) / 1000);
    const time = new Date();
    document.querySelector('#clock').textContent =
        `${Math.floor(seconds / 3600)}:${two(Math.floor(seconds / 60) % 60)}:${two(seconds % 60)}`;
    document.querySelector('#time').textContent = `${two(time.getHours())}:${two(time.getMinutes())}`;
};
if (presents) {
    tick();
    setInterval(tick, 1000);
}
// On paper, all answers are open.
addEventListener('beforeprint', () => document.querySelectorAll('details').forEach(it => { it.open = true; }));
