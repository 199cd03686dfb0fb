// The deck: one slide at a time where the window is wide enough (see slides.css), else all, one below the other.
const root = document.documentElement, slides = [...document.querySelectorAll('.slide')];
root.classList.add('deck');
const now = () => Math.max(0, slides.findIndex(slide => `#${slide.id}` === location.hash));
const show = number => {
    location.replace(`#${slides[Math.min(Math.max(number, 0), slides.length - 1)].id}`);
};
addEventListener('keydown', event => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const to = {
        ArrowRight: now() + 1, PageDown: now() + 1, ' ': now() + 1,
        ArrowLeft: now() - 1, PageUp: now() - 1, Home: 0, End: slides.length - 1,
    }[event.key];
    if (to !== undefined) show(to);
    else if (event.key === 'f' || event.key === 'F') document.fullscreenElement ? document.exitFullscreen() : root.requestFullscreen();
    else return;
    event.preventDefault();
});
