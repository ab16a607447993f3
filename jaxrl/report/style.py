"""The look of a page: its frame and its style sheet, light and dark, for wide and narrow screens."""

from __future__ import annotations

from html import escape


def document(name: str, subtitle: str, body: str) -> str:
    """A page in the report's style. `name` is text; `subtitle` and `body` are HTML."""
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{escape(name)} · jaxrl</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>{escape(name)}</h1><p class=sub>{subtitle}</p></header>{body}</main></body></html>\n"
    )


STYLE = """
:root{color-scheme:light dark;--bg:#fbfaf8;--card:#fff;--ink:#1d1f23;--soft:#62666e;--rule:#e4e2dd;--c1:#2563a8;
--c2:#c2571a;--c3:#2f855a;--c4:#8554b0;--c5:#b8871b;--c6:#c23b5a;--c7:#16899c;--c8:#5b4bb5;--c9:#8b8f97;--c10:#8fb8de;
--c11:#a3b84a;--c12:#7a6a58;--c13:#b0478f}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1d2024;--ink:#e8e6e1;--soft:#a2a6ae;--rule:#33373d;
--c1:#6ea8e8;--c2:#f0935a;--c3:#63c08f;--c4:#bb92e0;--c5:#dfb655;--c6:#ec7590;--c7:#5cc3d4;--c8:#9d8ff0;--c9:#858a93;
--c10:#3f6f9f;--c11:#7f9136;--c12:#b8a591;--c13:#e07fc0}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);
font:16px/1.5 system-ui,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans","DejaVu Sans",sans-serif;
-webkit-text-size-adjust:100%;overflow-wrap:anywhere}main{max-width:1180px;margin:0 auto;padding:32px 20px 64px}h1{
font-size:1.75rem;line-height:1.2;margin:0}h2{font-size:1.2rem;margin:44px 0 12px}h3{font-size:1rem;margin:0}small{
font-weight:400;color:var(--soft)}p{margin:0}.sub{color:var(--soft);font-size:.875rem}.note{color:var(--soft);
border-left:3px solid var(--c5);padding:4px 12px;margin:12px 0}.alarm{color:var(--ink);
border-left-width:6px;border-color:var(--c6);background:color-mix(in srgb,var(--c6) 12%,transparent);padding:10px 14px}
.verdicts{list-style:none;margin:0 0 24px;padding:10px 14px;border-left:6px solid var(--c5);
background:color-mix(in srgb,var(--c5) 10%,transparent)}.verdicts li+li{margin-top:4px}.headlines{display:grid;
grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:16px 24px;margin:24px 0 28px}.headlines dt{
color:var(--soft);font-size:.875rem}.headlines dd{margin:0}.headlines dd:not(.sub){font-size:1.75rem;line-height:1.2;
font-weight:600;font-variant-numeric:tabular-nums}.charts{display:grid;
grid-template-columns:repeat(auto-fill,minmax(min(320px,100%),1fr));gap:16px}figure{margin:0;background:var(--card);
border:1px solid var(--rule);border-radius:8px;padding:14px 14px 8px;display:flex;flex-direction:column}figure ul{
list-style:none;margin:2px 0 6px;padding:0;display:flex;flex-wrap:wrap;gap:0 12px;font-size:.8125rem;
color:var(--soft)}figure li::before{content:"";display:inline-block;width:10px;height:10px;border-radius:2px;
margin-right:5px;background:var(--c)}figure li.faint::before{opacity:.3}figure li.dash::before{height:0;
border-radius:0;border-top:2px dashed var(--ink);background:none;vertical-align:middle}figure li.mark::before{
width:0;border-radius:0;border-left:2px dotted var(--soft);background:none;vertical-align:-1px}.none{color:var(--soft);
font-size:.875rem;margin:auto;padding:40px 16px;text-align:center}
figure>p{color:var(--soft);font-size:.8125rem}svg{display:block;width:100%;height:auto;
margin-top:auto}svg text{font-size:11.5px;fill:var(--soft);font-variant-numeric:tabular-nums}.grid{stroke:var(--rule);
stroke-width:1}.mark{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3}.line{fill:none;stroke:var(--c);
stroke-width:1.8;stroke-linejoin:round}.line.dash{stroke-dasharray:5 4;stroke:var(--ink)}
rect,circle{fill:var(--c)}.band{fill:var(--c);opacity:.14}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{
--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}.c6{--c:var(--c6)}.c7{--c:var(--c7)}.c8{--c:var(--c8)}.c9{
--c:var(--c9)}.c10{--c:var(--c10)}.c11{--c:var(--c11)}.c12{--c:var(--c12)}.c13{--c:var(
--c13)}
table{width:100%;border-collapse:collapse;font-size:.9375rem}th{text-align:left;font-weight:600}thead th{
color:var(--soft);font-size:.8125rem}td,th{padding:7px 16px 7px 0;border-bottom:1px solid var(--rule);
vertical-align:top}.num{font-variant-numeric:tabular-nums}code,pre{
font:.8438rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}pre{margin:0;
white-space:pre-wrap;max-height:20em;overflow:auto}
.shades{font-size:.875rem;margin:8px 0}.shades span{padding:1px 6px}
.samples pre.answer{color:var(--soft);margin-left:1.5em}.p1{background:#d6272822}.p2{background:#d6272844}
.p3{background:#d6272866}.p4{background:#d6272899}.samples{table-layout:fixed}.samples th:nth-child(1){width:84px}
.samples .key{white-space:nowrap}
.samples th:nth-child(2){width:32%}.samples th:nth-child(4){width:130px}.samples th:nth-child(5){width:140px}
.facts th{width:110px;color:var(--soft);
font-weight:400}.legend{list-style:none;margin:16px 0;padding:0;display:flex;flex-wrap:wrap;gap:4px 20px}
.legend li::before{content:"";display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:6px;
background:var(--c)}.wide{overflow-x:auto}.scroll{max-height:85vh;overflow-y:auto}
.rows{grid-template-columns:1fr;margin-top:16px}.rows svg{width:calc(100% - 56px);margin:0 12px 0 44px;overflow:visible}
.heat0{--o:.06}.heat1{--o:.18}.heat2{--o:.3}.heat3{--o:.43}.heat4{--o:.56}
.heat5{--o:.7}.heat6{--o:.85}.heat7{--o:1}[class*=heat]{fill-opacity:var(--o)}figure li[class*=heat]::before{
opacity:var(--o)}.controls{display:flex;flex-wrap:wrap;gap:8px 12px;align-items:center;margin:10px 0 14px}
.controls[hidden]{display:none}select,input{font:inherit;font-size:.875rem;padding:4px 8px;color:var(--ink);
background:var(--card);border:1px solid var(--rule);border-radius:6px;max-width:100%}
th button{font:inherit;color:inherit;
background:none;border:0;padding:0;text-align:left}th button:enabled{cursor:pointer;text-decoration:underline dotted}
th[aria-sort=descending] button::after{content:" ↓"}th[aria-sort=ascending] button::after{content:" ↑"}
details{font-size:.875rem;color:var(--soft);margin-top:4px}summary{cursor:pointer}tr[hidden]{display:none!important}
.compared{overflow-wrap:normal}.compared td,.compared th{min-width:110px;max-width:340px}.compared tbody th{
font-weight:400;color:var(--soft)}.compared code{overflow-wrap:anywhere}
@media(max-width:640px){main{padding:20px 14px 48px}h1{font-size:1.4rem}.headlines{
grid-template-columns:1fr 1fr}.headlines dd:not(.sub){font-size:1.4rem}
.samples thead tr{display:flex;gap:20px}.samples thead th:not(:has(button)){display:none}.samples thead{display:block}
.samples,.samples tbody,.samples tr,.samples td,.samples th{display:block;width:auto}.samples tr{
border-bottom:1px solid var(--rule);padding:8px 0}.samples td,.samples th{border:0;padding:3px 0}.samples td::before{
content:attr(data-label);color:var(--soft);font-size:.8125rem;display:block}.samples .num{display:inline-block;
margin-right:28px}
.config td:first-child{overflow-wrap:normal}.config td:nth-child(3),.config th:nth-child(3){display:none}}
"""
